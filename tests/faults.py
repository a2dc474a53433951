"""How many one-line faults in a room the tests find.

    python -m tests.faults collect                        thirty faults that the commit draws
    python -m tests.faults collect --count 3 --seed 7     fewer, and others

A fault is one changed expression: a comparison, a constant, a boolean, arithmetic, or what is
returned. It is made in a copy of the tree, where tests run until one fails: first those that name
the changed module, then the others that name the room, but for those on a real Slurm or GPU. What
no test finds is printed as a diff.
"""

import argparse
import ast
import difflib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from copy import copy
from pathlib import Path
from typing import Any, Final

import pytest

from tests.size import ROOT, git

_PAIRS: Final = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
    (ast.FloorDiv, ast.Mod),
)
_SWAPPED: Final[dict[type, Any]] = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}}
#: Keywords whose change changes nothing that a test could see, or only at times.
_SEEN_BY_NOBODY: Final = {"strict", "frozen", "slots", "kw_only", "maintain_order"}
#: Longer than any room's tests take.
_LIMIT_S: Final = 1_200.0


def faults_in(text: str) -> Iterator[tuple[int, str]]:
    """The line and the changed text of every fault that can be made in a file's text."""
    lines = text.splitlines(keepends=True)
    for node, changed in _changes(ast.parse(text)):
        if node.lineno == node.end_lineno:
            line = lines[node.lineno - 1].encode()
            line = line[: node.col_offset] + changed.encode() + line[node.end_col_offset :]
            after = [*lines[: node.lineno - 1], line.decode(), *lines[node.lineno :]]
            yield node.lineno, "".join(after)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.Return, str]]:
    """The expressions and returns below a node, each with what may stand in its place."""
    if isinstance(node, ast.expr | ast.Return) and (changed := _changed(node)) is not None:
        yield node, changed
    if isinstance(node, ast.JoinedStr) or getattr(node, "arg", "") in _SEEN_BY_NOBODY:
        return  # before Python 3.12 nobody knows where the parts of an f-string stand
    for field, value in ast.iter_fields(node):
        if field not in {"annotation", "returns", "decorator_list"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from _changes(child)


def _changed(node: ast.expr | ast.Return) -> str | None:
    """What makes a fault of an expression or a return; None of one that is left alone."""
    match node:
        case ast.Return(value=ast.expr() as value) if ast.unparse(value) != "None":
            return "return None"
        case ast.Compare(ops=[op]) | ast.BoolOp(op=op) | ast.BinOp(op=op) if type(op) in _SWAPPED:
            swapped: Any = copy(node)
            swapped.ops, swapped.op = [_SWAPPED[type(op)]()], _SWAPPED[type(op)]()
            return f"({ast.unparse(swapped)})"
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return f"({ast.unparse(operand)})"
        case ast.Constant(value=bool(value)):
            return str(not value)
        case ast.Constant(value=int() | float() as value):
            return repr(value + 1)
    return None


def _failed(tree: Path, names: Sequence[str]) -> str:
    """The first test that fails, that tests did not end in time, or ""."""
    command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-pno:randomly", "-rfE", "-n2"]
    with subprocess.Popen(
        [*command, *names],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": str(tree)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            said, _ = process.communicate(timeout=_LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"no end in {_LIMIT_S:.0f} s"
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
    if failed is not None:
        return failed[1]
    return "" if process.returncode in {0, pytest.ExitCode.NO_TESTS_COLLECTED} else said[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("room", help="collect say, or a folder of it")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", help="of the draw (default: the commit's hash)")
    asked = parser.parse_args()
    seed = asked.seed or git("rev-parse", "HEAD").decode().strip()
    lines: dict[tuple[str, int], list[str]] = defaultdict(list)
    for name in git("ls-files", f"{asked.room}/*.py").decode().splitlines():
        for line, after in faults_in((ROOT / name).read_text(encoding="utf-8")):
            lines[name, line].append(after)
    draw, survived = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns("out", ".*"))
        (Path(folder) / "shared").symlink_to((ROOT.parent / "shared").resolve())
        paths = [p for p in tree.glob("tests/**/test_*.py") if not {"gpu", "cluster"} & {*p.parts}]
        texts = {str(path.relative_to(tree)): path.read_text("utf-8") for path in sorted(paths)}
        named = re.compile(rf"dynamiccl[.-]{asked.room.replace('/', '.')}\b")
        tests = {n: t for n, t in texts.items() if f"/{asked.room}/" in n or named.search(t)}
        if failed := _failed(tree, [*tests]):
            raise SystemExit(f"without a fault: {failed}")
        for name, line in draw.sample(sorted(lines), asked.count):
            before, after = (tree / name).read_text("utf-8"), draw.choice(lines[name, line])
            (tree / name).write_text(after, encoding="utf-8")
            package, _, stem = name.removesuffix(".py").replace("/", ".").rpartition(".")
            module = rf"dynamiccl\.{package}\.{stem}\b|dynamiccl\.{package} import .*\b{stem}\b"
            near = [test for test, text in tests.items() if re.search(module, text)]
            near += [f"dynamiccl/{name}"] if ">>>" in before else []
            far = [test for test in tests if test not in near]
            failed = (near and _failed(tree, near)) or _failed(tree, far)
            (tree / name).write_text(before, encoding="utf-8")
            survived += not failed
            change = difflib.unified_diff(before.splitlines(True), after.splitlines(True), n=1)
            found = f"found by {failed}" if failed else f"no test fails\n{''.join(change)}"
            sys.stdout.write(f"{name}:{line}: {found}\n")
            sys.stdout.flush()
    sys.stdout.write(f"seed {seed}: {asked.count - survived} of {asked.count} found\n")


if __name__ == "__main__":
    main()
