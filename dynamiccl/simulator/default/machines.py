"""Machine descriptions in TOML: built-in ones, and the user's."""

import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path as FilePath
from typing import Any, Final, TypeVar

from dynamiccl.errors import CorruptFile, UnknownName
from dynamiccl.nccl import Algorithm
from dynamiccl.simulator.default.graph import Basis, Cpu, Machine, Path, Pattern, Search

T = TypeVar("T")
_FOLDER: Final = "machines"


def machine_names() -> list[str]:
    """Names of the built-in machines."""
    folder = resources.files(__package__).joinpath(_FOLDER)
    return sorted(item.name.removesuffix(".toml") for item in folder.iterdir())


@cache
def find_machine(name: str) -> Machine:
    """The built-in machine of that name. Raises UnknownName with the choices."""
    if name not in machine_names():
        raise UnknownName("machine", name, machine_names())
    file = resources.files(__package__).joinpath(_FOLDER, f"{name}.toml")
    return parse_machine(name, file.read_text(encoding="utf-8"))


def read_machine(path: FilePath) -> Machine:
    """A machine from a file. Raises CorruptFile where the description is wrong."""
    return parse_machine(path.stem, path.read_text(encoding="utf-8"))


def parse_machine(name: str, text: str) -> Machine:
    """A machine from TOML. Raises CorruptFile, and UnknownName for a value that is no choice."""
    try:
        fields = tomllib.loads(text)
        searches = [_search(name, table) for table in fields.pop("search", [])]
        without = [Algorithm.parse(text, where=name) for text in fields.pop("without", [])]
        fields["cpu"] = _choice({item.value: item for item in Cpu}, fields["cpu"], name)
        machine = Machine(name=name, searches=searches, without=frozenset(without), **fields)
    except tomllib.TOMLDecodeError as error:
        raise CorruptFile(f"machine {name} is not TOML: {error}") from error
    except KeyError as error:
        raise CorruptFile(f"machine {name} lacks {error}") from error
    except (TypeError, ValueError) as error:
        raise CorruptFile(f"machine {name}: {error}") from error
    return machine


def _search(name: str, table: Mapping[str, Any]) -> Search:
    fields = dict(table)
    intra, inter = fields.pop("gbytes_per_s")
    intra_path, inter_path = (_choice(Path.__members__, text, name) for text in fields.pop("paths"))
    return Search(
        pattern=_choice({item.value: item for item in Pattern}, fields.pop("pattern"), name),
        basis=_choice({item.value: item for item in Basis}, fields.pop("basis"), name),
        nodes=_span(fields.pop("nodes")),
        ranks_per_node=_span(fields.pop("ranks_per_node")),
        intra_gbytes_per_s=intra,
        inter_gbytes_per_s=inter,
        intra_path=intra_path,
        inter_path=inter_path,
        **fields,
    )


def _span(ends: Sequence[int]) -> tuple[int, int]:
    low, high = ends
    return low, high


def _choice(choices: Mapping[str, T], text: str, name: str) -> T:
    if text not in choices:
        raise UnknownName("value", text, choices, where=f"machine {name}")
    return choices[text]
