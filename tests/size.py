"""How large the project is: lines a room, and what tells shorter code from denser code.

    python -m tests.size                  this tree, as `git ls-files` has it
    python -m tests.size --against REV    and what changed since a revision

Statements are those of the syntax tree: they fall as lines do where code goes, and stay where it is
only written closer. Characters are without line ends.
"""

import ast
import io
import re
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
FOLDERS: Final = ("collect", "datasets", "dynamiccl", "evaluate", "serve", "train")
#: C++ that no job loads.
PLUGIN_TESTS: Final = re.compile(r"serve/plugin/(tests|bench|fuzz)/")
_TEXTS: Final = (".py", ".cpp", ".h", ".c", ".md")

Files = Mapping[str, str]


def tracked() -> Files:
    """The texts of all tracked files of the tree, by name; links are left out."""
    names = git("ls-files", "-z").decode().split("\0")
    paths = {name: ROOT / name for name in names if name.endswith(_TEXTS)}
    # One that was deleted and not yet committed is tracked still.
    return {n: p.read_text("utf-8") for n, p in paths.items() if p.is_file() and not p.is_symlink()}


def tracked_at(revision: str) -> Files:
    """The same of a revision."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(git("archive", revision))) as archive:
        for member in archive:
            file = archive.extractfile(member) if member.isfile() else None
            if file is not None and member.name.endswith(_TEXTS):
                found[member.name] = file.read().decode()
    return found


def git(*arguments: str) -> bytes:
    # Whoever owns the checkout: in a container it can be somebody else.
    command = ["git", "-c", "safe.directory=*", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=False)
    if done.returncode != 0:
        raise SystemExit(done.returncode)  # git has said why
    return done.stdout


def room_of(name: str) -> str:
    """The room of a file of Python, C++ or text by its name; "" of what is in none."""
    top = name.partition("/")[0]
    if name.endswith(".md"):
        return "docs" if top == "docs" else ""
    if name.startswith("serve/plugin/"):
        return "serve/plugin tests" if PLUGIN_TESTS.match(name) else "serve/plugin"
    if name.startswith("dynamiccl/simulator/"):
        return "dynamiccl/simulator"
    return top if name.endswith(".py") and top in {*FOLDERS, "tests", "benchmarks"} else ""


def lines_by_room(files: Files) -> dict[str, int]:
    """Lines of each room."""
    found: dict[str, int] = {}
    for name, text in files.items():
        if room := room_of(name):
            found[room] = found.get(room, 0) + len(text.splitlines())
    return dict(sorted(found.items()))


def measure(files: Files) -> dict[str, float]:
    """Every figure by its name."""
    python = {name: text for name, text in files.items() if name.endswith(".py")}
    product = [text for name, text in python.items() if name.partition("/")[0] in FOLDERS]
    pages = [t for n, t in files.items() if room_of(n) == "docs"]
    lines = _lines(product)
    nodes = [node for text in product for node in ast.walk(ast.parse(text))]
    characters = sum(len(line) for text in product for line in text.splitlines())
    return {
        **{f"lines: {room}": number for room, number in lines_by_room(files).items()},
        "lines: all Python": _lines(python.values()),
        "product: lines": lines,
        "product: files": len(product),
        "product: statements": sum(isinstance(node, ast.stmt) for node in nodes),
        "product: characters a line": characters / lines,
        "product: docstrings, % of lines": 100 * sum(map(_docstring_lines, nodes)) / lines,
        "product: dataclasses": sum(map(_is_dataclass, nodes)),
        "docs: words": sum(len(text.split()) for text in pages),
    }


def _lines(texts: Iterable[str]) -> int:
    return sum(len(text.splitlines()) for text in texts)


def _docstring_lines(node: ast.AST) -> int:
    match node:
        case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
            if ast.get_docstring(node) is not None:
                first = node.body[0]
                return (first.end_lineno or first.lineno) - first.lineno + 1
    return 0


def _is_dataclass(node: ast.AST) -> bool:
    decorators = node.decorator_list if isinstance(node, ast.ClassDef) else []
    return any(ast.unparse(each).startswith("dataclass") for each in decorators)


def table(now: Mapping[str, float], before: Mapping[str, float] | None = None) -> str:
    """A line a figure, and beside it what it was and by how many per cent it changed."""
    rows = []
    for name in {**now, **(before or {})}:
        new, old = now.get(name, 0), (before or {}).get(name, 0)
        row = f"{name:<34}{new:>11,.1f}"
        if before is not None:
            change = f"{100 * (new / old - 1):+.1f} %" if old else "new"
            row += f"{old:>11,.1f}{change:>10}"
        rows.append(row)
    return "\n".join(rows) + "\n"


def main() -> None:
    match sys.argv[1:]:
        case []:
            sys.stdout.write(table(measure(tracked())))
        case ["--against", revision]:
            sys.stdout.write(table(measure(tracked()), measure(tracked_at(revision))))
        case _:
            raise SystemExit("usage: python -m tests.size [--against REV]")


if __name__ == "__main__":
    main()
