"""Finds names that the product never reads (vulture), except those listed with a reason.

    python -m tests.dead

Tests, benchmarks and examples are no readers. Members of enums are left out: they mirror the words
of NCCL, of a library or of a file format, all of them or none. `tests/dead.toml` lists what vulture
cannot see a reader of: a name, or a class with all that is in it. The listing may not grow beyond
MAX_LISTED, and an entry that nothing needs any more is an error too.
"""

import ast
import sys
import tomllib
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
LISTED: Final = ROOT / "tests" / "dead.toml"
MAX_LISTED: Final = 30
_ENUMS: Final = {"Enum", "Flag", "IntEnum", "IntFlag", "StrEnum", "_Named"}


def classes_around(path: Path, line: int) -> list[ast.ClassDef]:
    """The classes that a line of a file stands in."""
    nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    found = (node for node in nodes if isinstance(node, ast.ClassDef))
    return [node for node in found if node.lineno < line <= (node.end_lineno or node.lineno)]


def is_enum(node: ast.ClassDef) -> bool:
    return any(ast.unparse(base).rpartition(".")[2] in _ENUMS for base in node.bases)


def unread(listed: dict[str, str]) -> tuple[list[str], set[str]]:
    """Dead names without a listed reason, and the listed entries that were needed."""
    from vulture import Vulture

    config = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["vulture"]
    vulture = Vulture(
        ignore_names=config["ignore_names"], ignore_decorators=config["ignore_decorators"]
    )
    vulture.scavenge([str(ROOT / path) for path in config["paths"]])
    found, needed = [], set()
    for item in vulture.get_unused_code(min_confidence=config["min_confidence"]):
        around = classes_around(Path(item.filename), item.first_lineno)
        reasons = {item.name, *(node.name for node in around)} & listed.keys()
        needed |= reasons
        if not reasons and not any(map(is_enum, around)):
            place = Path(item.filename).relative_to(ROOT)
            found.append(f"{place}:{item.first_lineno}: nothing reads {item.typ} '{item.name}'")
    return found, needed


def main() -> int:
    """Print dead names; returns 1 when there are any."""
    listed: dict[str, str] = tomllib.loads(LISTED.read_text(encoding="utf-8"))
    found, needed = unread(listed)
    found += [
        f"{LISTED.name}: '{name}' has readers: take it out" for name in listed.keys() - needed
    ]
    if len(listed) > MAX_LISTED:
        found.append(f"{LISTED.name} lists {len(listed)} names; {MAX_LISTED} are the most")
    sys.stderr.writelines(f"{line}\n" for line in found)
    return 1 if found else 0


if __name__ == "__main__":
    raise SystemExit(main())
