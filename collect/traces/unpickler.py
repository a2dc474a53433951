"""Unpickles plain values (dict, list, tuple, str, numbers, None), and refuses everything else.

A pickle is a program that can call anything. What PyTorch's Flight Recorder writes needs none of
it: dicts, lists, tuples, text, numbers and None have instructions of their own. So every other
instruction is refused before it does something.
"""

import io
import pickle
import pickletools
from typing import Any, Final, NoReturn

from dynamiccl.errors import CorruptFile

#: Instructions that find, call or build something by name (`pickletools` lists all of them).
_REFUSED: Final = frozenset(
    {
        *("GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "NEWOBJ", "NEWOBJ_EX", "BUILD"),
        *("EXT1", "EXT2", "EXT4", "PERSID", "BINPERSID", "NEXT_BUFFER", "READONLY_BUFFER"),
    }
)


class _PlainUnpickler(pickle.Unpickler):
    """Refuses classes and globals once more, as a second line of defence."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"names {module}.{name}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError(f"refers to {pid!r} outside")


def loads_plain(data: bytes, *, where: str) -> Any:
    """The value of a pickle of plain values; raises CorruptFile for any other, and for damage."""
    try:
        instructions = [
            (each.name, argument, at) for each, argument, at in pickletools.genops(data)
        ]
    except Exception as error:
        raise _damaged(where, error) from error
    for name, argument, place in instructions:
        if name in _REFUSED:
            told = f" of '{argument}'" if isinstance(argument, str) else ""
            raise CorruptFile(
                f"{where} holds the pickle instruction {name}{told} at byte {place}, which can run "
                "code; a Flight Recorder's dump has none: do not trust where it comes from"
            )
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except Exception as error:
        raise _damaged(where, error) from error


def _damaged(where: str, error: Exception) -> CorruptFile:
    # Of damaged bytes the decoder raises nearly anything: KeyError, IndexError, struct.error.
    told = f"{type(error).__name__}: {error}".splitlines()[0]
    return CorruptFile(f"{where} is no whole pickle ({told}); copy it again")
