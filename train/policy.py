"""TorchScript files, and a trained policy loaded from its directory."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.manifest import POLICY_NAME, Manifest
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


#: h and c of an LSTM, each (N, U).
State = tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]


class TorchPolicy:
    """The TorchScript policy of a run or an artifact, and its manifest."""

    def __init__(self, module: torch.nn.Module, manifest: Manifest) -> None:
        """Wrap a loaded module."""
        self._module = module
        self.manifest = manifest

    @classmethod
    def load(cls, directory: Path) -> "TorchPolicy":
        """Read and verify a policy directory; raises as `Manifest.read`, and CorruptFile."""
        manifest = Manifest.read(directory)
        return cls(load_script(directory / POLICY_NAME), manifest)

    def weights(self) -> dict[str, torch.Tensor]:
        """All parameters and buffers, by name."""
        return dict(self._module.state_dict())

    @property
    def state_units(self) -> int:
        """Width of the state kept for each job, h and c; 0 = stateless."""
        return int(getattr(self._module, "state_units", 0))

    def step(
        self,
        observations: Observations,
        mask: npt.NDArray[np.bool_],
        decided: npt.NDArray[np.int64],
        state: State,
    ) -> tuple[npt.NDArray[np.int64], State]:
        """(N,) the next decisions of N jobs, each about one key, and their states after them.

        `decided` (N,) is the action that was decided last about the key, -1 = none. For a policy
        that has a state.
        """
        module: Any = self._module
        with torch.no_grad():
            action, _, h, c = module.step(
                torch.from_numpy(observations.window),
                torch.from_numpy(observations.context),
                torch.from_numpy(mask.astype(np.float32)),
                torch.from_numpy(decided),
                *(torch.from_numpy(part) for part in state),
            )
        return action.numpy(), (h.numpy(), c.numpy())

    def values(
        self, observations: Observations, mask: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float32]:
        """(N, A) Q values; those of masked actions are far below all others."""
        return forward(self._module, observations, mask)[1]

    def least_gains(self, observations: Observations) -> npt.NDArray[np.float64] | None:
        """(N, A) gains over NCCL's own choice (ln) to be beaten: the policy's caution x spreads.

        None for a policy without spreads.
        """
        module: Any = self._module
        if not hasattr(module, "predict"):
            return None
        with torch.no_grad():
            _, spread, caution = module.predict(torch.from_numpy(observations.context))
        # Infinite caution times a spread of 0 would be no number.
        found: torch.Tensor = caution.unsqueeze(1) * spread.clamp(min=1e-9)
        return found.double().numpy()

    def act(self, observations: Observations, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """(N,) the chosen action of each observation, allowed by `mask` (N, A)."""
        return forward(self._module, observations, mask)[0]


def forward(
    module: torch.nn.Module, observations: Observations, mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Actions (N,) and Q values (N, A) of a policy module."""
    with torch.no_grad():
        action, q = module(
            torch.from_numpy(observations.window),
            torch.from_numpy(observations.context),
            torch.from_numpy(mask.astype(np.float32)),
        )
    return action.numpy(), q.numpy()
