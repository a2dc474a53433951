"""The file tree of docs/tree.md, from the first line of each file: `python -m tests.tree --write`.

The comment behind a file is its own first sentence, so the tree cannot say what the file does not.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from tests.generated import GeneratedPart

ROOT: Final = Path(__file__).resolve().parents[1]
PART: Final = GeneratedPart(
    ROOT / "docs" / "tree.md",
    "<!-- tree: made by `make tree` -->\n```text\n",
    "```\n<!-- end of tree -->",
)
#: The folders at the root, in the order of the data's way through them.
TOPS: Final = (
    "dynamiccl",
    "collect",
    "datasets",
    "train",
    "evaluate",
    "serve",
    "examples",
    "benchmarks",
    "docs",
    "tests",
)
#: Folders of fixtures, whose files are named by what reads them.
SKIPPED: Final = {"tests/data", "serve/plugin/fuzz/corpus"}
_COLUMN: Final = 36
_CODE: Final = {".cpp", ".c", ".h"}
_SUFFIXES: Final = {".py", ".toml", ".md", ".csv", ".jinja", ".txt", ".sh", ".ipynb", "", *_CODE}


def render() -> str:
    """The tree as text, one line a folder or file."""
    return "\n".join(line for top in TOPS for line in _lines(ROOT / top)) + "\n"


def _lines(folder: Path) -> Iterator[str]:
    """A folder's line, those of its files, and those of its folders."""
    depth = len(folder.relative_to(ROOT).parts)
    yield _line("  " * (depth - 1) + folder.name + "/", _folder_comment(folder))
    inside = [path for path in sorted(folder.iterdir()) if not path.is_symlink()]
    for path in inside:
        shown = path.suffix in _SUFFIXES and not path.name.startswith(".")
        if path.is_file() and shown and path.name != "__init__.py":
            yield _line("  " * depth + path.name, _comment(path))
    for path in inside:
        if path.is_dir() and _has_files(path):
            yield from _lines(path)


def _has_files(folder: Path) -> bool:
    """Whether it holds something of ours, now; tools leave empty folders and caches."""
    if folder.name.startswith((".", "__")) or str(folder.relative_to(ROOT)) in SKIPPED:
        return False
    return any(p.is_file() and "__pycache__" not in p.parts for p in folder.rglob("*"))


def _line(name: str, comment: str) -> str:
    return f"{name:<{_COLUMN}} {comment}".rstrip()


def _folder_comment(folder: Path) -> str:
    init, page = folder / "__init__.py", folder / "README.md"
    if init.is_file():
        return _comment(init)
    title = _comment(page) if page.is_file() else ""
    return title.partition(": ")[2] or title


def _comment(path: Path) -> str:
    if path.suffix in {".ipynb", ".csv", ".jinja"}:
        return ""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    elif path.suffix in _CODE:
        match = re.search(r"^(?://|/\*)\s*(.+)$", text, re.MULTILINE)
        first = match[1] if match else ""
    else:
        lines = [line for line in text.split("\n") if not line.startswith("#!")]
        first = lines[0].lstrip('# "')
        if first.startswith("SBATCH"):
            first = ""
    return first.rstrip(".").replace("`", "")


written = PART.written

if __name__ == "__main__":
    PART.main(render)
