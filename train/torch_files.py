"""Reads and writes TorchScript files, with torch's deprecation warning suppressed."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from dynamiccl.errors import CorruptFile


def save_script(module: torch.nn.Module, path: Path) -> None:
    """Script a module in eval mode and save it."""
    scripted = script(module)
    with _ignored_deprecation():
        # Not by its own writer, which ends the process on a full disk (torch 2.13).
        path.write_bytes(scripted.save_to_buffer())


def script(module: torch.nn.Module) -> Any:
    """The module as TorchScript, in eval mode."""
    with _ignored_deprecation():
        return torch.jit.script(module.eval())


def load_script(path: Path) -> Any:
    """A saved module in eval mode; raises CorruptFile when it is no TorchScript."""
    with _ignored_deprecation():
        try:
            module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise CorruptFile(f"{path} is not a TorchScript file: {error}") from error
    return module.eval()


@contextmanager
def _ignored_deprecation() -> Iterator[None]:
    """Suppress the warning: TorchScript is deprecated from torch 2.13 on."""
    with warnings.catch_warnings():
        # Of any category: a DeprecationWarning in torch 2.13, a FutureWarning from 2.14 on.
        warnings.filterwarnings("ignore", r"`torch\.jit\.")
        yield
