"""The table of docs/environment.md, from the places that read variables (`make tree`).

What a variable does is said beside a place that reads it, by a comment that begins with its name:

    //   DYNAMICCL_RUN_DIR  where local sockets lie. Default: $XDG_RUNTIME_DIR/dynamiccl,
    //                      else /tmp/dynamiccl-UID.

in C++, and the same behind `#` in Python and in shell. Lines that stand deeper go on with it.
"""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.generated import GeneratedPart

ROOT: Final = Path(__file__).resolve().parents[1]
PART: Final = GeneratedPart(
    ROOT / "docs" / "environment.md",
    "<!-- variables: made by `make tree` -->\n",
    "<!-- end of variables -->",
)
#: Where comments are looked for, in this order: the first one of a variable is taken.
FOLDERS: Final = (
    "serve/launch",
    "serve/plugin",
    "serve",
    "dynamiccl",
    "collect",
    "datasets",
    "train",
    "evaluate",
    "benchmarks",
    "tests/gpu",
)
#: Tests and benchmarks of the plugin, and a process that a test starts with variables of its own.
SKIPPED: Final = re.compile(r"serve/plugin/(tests|bench|fuzz)/|tests/gpu/nccl_worker\.py")
#: Handed on unread.
NOT_OURS: Final = {"PATH", "HOME", "PYTHONPATH"}
_NAME: Final = re.compile(r"[A-Z][A-Z0-9]*(_[A-Za-z0-9]+)*\Z")
#: A literal that can only be a variable, where a file looks them up by a name that it holds.
_SURE: Final = re.compile(
    r"(DYNAMICCL|NCCL|SLURM|OMPI|PMI|PMIX|TORCHELASTIC|MASTER|XDG)_\w+\Z|RANK\Z|WORLD_SIZE\Z"
)
_COMMENT: Final = re.compile(r"\s*(?://|#:?)(\s+)([A-Z][A-Za-z0-9_]+)(\s\s+)(\S.*)")
_MORE: Final = re.compile(r"\s*(?://|#:?)(\s+)(\S.*)")


@dataclass(frozen=True)
class Source:
    """A file that may read variables."""

    path: str
    text: str

    @property
    def language(self) -> str:
        """`c++`, `python` or `shell`."""
        if self.path.endswith((".cpp", ".h")):
            return "c++"
        is_python = self.path.endswith(".py") or "python" in self.text.partition("\n")[0]
        return "python" if is_python else "shell"


def sources() -> list[Source]:
    """All files that may read variables."""
    found: dict[str, Source] = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*")):
            name = str(path.relative_to(ROOT))
            is_code = path.suffix in {".py", ".cpp", ".h", ".sh"} or folder == "serve/launch"
            left_out = "__pycache__" in name or SKIPPED.match(name)
            if is_code and path.is_file() and not left_out:
                found.setdefault(name, Source(name, path.read_text(encoding="utf-8")))
    return list(found.values())


def reads(source: Source, constants: dict[str, str]) -> set[str]:
    """The variables that a file reads."""
    finder = {"c++": _of_cpp, "shell": _of_shell}.get(source.language)
    found = finder(source.text) if finder else _of_python(source.text, constants)
    return {name for name in found if _NAME.match(name)} - NOT_OURS


def _of_cpp(text: str) -> set[str]:
    kept = re.sub(r"^#ifdef DYNAMICCL_TESTS$.*?^#endif$", "", text, flags=re.M | re.S)
    return {name for name in re.findall(r'"(\w+)"', kept) if _SURE.match(name)}


def _of_shell(text: str) -> set[str]:
    kept = re.sub(r"^\s*#.*$", "", text, flags=re.M)
    assigned = set(re.findall(r"\b([A-Z][A-Z0-9_]+)=(?!\$\{\1\b)", kept))
    first = {name for name in assigned if not re.search(rf"\$\{{{name}:?[-+]", kept)}
    used = re.findall(r"\$\{?([A-Z][A-Z0-9_]+)", kept)
    return set(used) - first | set(re.findall(r"\(setting (NCCL_\w+)\)", kept))


def _of_python(text: str, constants: dict[str, str]) -> set[str]:
    tree = ast.parse(text)
    keys = [key for node in ast.walk(tree) for key in _keys(node)]
    found = {key.value for key in keys if isinstance(key, ast.Constant)}
    names = {key.id for key in keys if isinstance(key, ast.Name)}
    found |= {constants[name] for name in names if name in constants}
    if any(name.islower() for name in names):
        # Names are looked up one by one: those of the tuples that the file holds.
        found |= {name for node in tree.body for name in _tuple(node)}
    return {name for name in found if isinstance(name, str)}


def _keys(node: ast.AST) -> Iterator[ast.expr]:
    """What is looked up in an environment at this node."""
    match node:
        case ast.Call(func=ast.Attribute(value=where, attr="get" | "setdefault"), args=[key, *_]):
            if _is_environment(where):
                yield key
        case ast.Call(func=ast.Name(id="_variable"), args=[key]):
            yield key
        case ast.Call(func=ast.Name(id="Role"), args=[_, key, *_]):
            yield key
        case ast.Subscript(value=where, slice=key, ctx=ast.Load()) if _is_environment(where):
            yield key
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[where]):
            if _is_environment(where):
                yield key
        case _:
            return


def _is_environment(node: ast.expr) -> bool:
    return ast.unparse(node) in {"os.environ", "environ", "env", "machine.env", "settings"}


def _tuple(node: ast.stmt) -> Iterator[str]:
    if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Tuple):
        values = [each.value for each in node.value.elts if isinstance(each, ast.Constant)]
        if values and all(isinstance(v, str) and _SURE.match(v) for v in values):
            yield from (str(value) for value in values)


def constants_of(files: list[Source]) -> dict[str, str]:
    """Names of Python's constants that hold a variable's name -> that name."""
    found = {}
    for source in files:
        for name, value in re.findall(r'^(\w+)(?:: Final)? = "(\w+)"$', source.text, re.M):
            if _SURE.match(value):
                found[name] = value
    return found


def comments(source: Source) -> dict[str, str]:
    """What the comments of a file say that begin with a variable's name."""
    found: dict[str, str] = {}
    lines = source.text.split("\n")
    for number, line in enumerate(lines):
        begun = _COMMENT.match(line)
        if begun is None:
            continue
        indent, name, _, text = begun.groups()
        words = [text, *_going_on(lines[number + 1 :], len(indent))]
        found.setdefault(name, " ".join(words))
    return found


def _going_on(lines: list[str], indent: int) -> Iterator[str]:
    """The texts of the comment lines that stand deeper than `indent`, up to the first other one."""
    for line in lines:
        more = _MORE.match(line)
        if more is None or len(more[1]) <= indent:
            return
        yield more[2]


def render() -> str:
    """The table as text, one line a variable."""
    files = sources()
    constants = constants_of(files)
    places: dict[str, list[str]] = {}
    said: dict[str, str] = {}
    for source in files:
        for name in reads(source, constants):
            places.setdefault(name, []).append(source.path)
        said = comments(source) | said
    silent = sorted(places.keys() - said.keys())
    if silent:
        raise SystemExit(f"no comment beside a read says what these do: {', '.join(silent)}")
    lines = ["| variable | what it does | read in |", "| --- | --- | --- |"]
    for name in sorted(places, key=_order):
        where = ", ".join(f"`{place}`" for place in places[name])
        lines.append(f"| `{name}` | {said[name].replace('|', chr(92) + '|')} | {where} |")
    return "\n".join(lines) + "\n"


def _order(name: str) -> tuple[int, str]:
    ranks = ("DYNAMICCL", "NCCL", "SLURM", "OMPI", "PMI", "PMIX", "TORCHELASTIC", "MASTER")
    prefix = name.partition("_")[0]
    return (ranks.index(prefix) if prefix in ranks else len(ranks), name)


written = PART.written

if __name__ == "__main__":
    PART.main(render)
