"""The README's file tree, made from the first line of each file: `python -P -m tests.tree --write`.

The comment behind a file is its own first sentence, so the tree cannot say what the file does not.
"""

import ast
import re
import sys
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
README: Final = ROOT / "README.md"
BEGIN: Final = "<!-- tree: made by `make tree` -->\n```text\n"
END: Final = "```\n<!-- end of tree -->"
FOLDERS: Final = (
    "dynamiccl",
    "collect",
    "collect/nccl_tests",
    "dynamiccl/simulator",
    "datasets",
    "datasets/sample",
    "train",
    "evaluate",
    "serve",
    "serve/ddp",
    "serve/plugin",
    "serve/plugin/nccl",
    "examples",
    "benchmarks",
    "docs",
)
_COLUMN: Final = 34
_SUFFIXES: Final = {".py", ".cpp", ".h", ".toml", ".md", ".csv", ".jinja", ".txt"}


def render() -> str:
    """The tree as text, one line a file."""
    lines = []
    for folder in FOLDERS:
        depth = folder.count("/")
        lines.append(_line("  " * depth + folder.rsplit("/", 1)[-1] + "/", _folder_comment(folder)))
        for path in sorted((ROOT / folder).iterdir()):
            if path.is_symlink() or path.is_dir() or path.suffix not in _SUFFIXES:
                continue
            if path.name != "__init__.py":
                lines.append(_line("  " * (depth + 1) + path.name, _comment(path)))
    lines.append(
        _line("tests/", "mirrors the packages; tests/data holds fixtures with their origin")
    )
    return "\n".join(lines) + "\n"


def _line(name: str, comment: str) -> str:
    return f"{name:<{_COLUMN}} {comment}".rstrip()


def _folder_comment(folder: str) -> str:
    init = ROOT / folder / "__init__.py"
    return _comment(init) if init.is_file() else ""


def _comment(path: Path) -> str:
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".py":
        first = (ast.get_docstring(ast.parse(text)) or "").split("\n")[0]
    elif path.suffix in {".cpp", ".h"}:
        match = re.search(r"^(?://|/\*)\s*(.+)$", text, re.MULTILINE)
        first = match[1] if match else ""
    elif path.suffix in {".toml", ".md", ".txt"}:
        first = text.split("\n")[0].lstrip("# ")
    else:
        first = ""
    return first.rstrip(".").replace("`", "")


def written() -> str:
    """The tree in the README."""
    text = README.read_text(encoding="utf-8")
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)]


if __name__ == "__main__" and "--write" in sys.argv:
    page = README.read_text(encoding="utf-8")
    begin, end = page.index(BEGIN) + len(BEGIN), page.index(END)
    README.write_text(page[:begin] + render() + page[end:], encoding="utf-8")
