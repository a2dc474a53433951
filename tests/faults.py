"""How many one-line faults in a room the tests find.

    python -m tests.faults collect                        thirty faults that the commit draws
    python -m tests.faults collect --count 3 --seed 7     fewer, and others

A fault is one changed expression: a comparison, a constant, a boolean, arithmetic, or what is
returned. It is made in a copy of the tree, where the tests that name the room run until one fails,
but for those on a real Slurm or GPU. Of what no test finds the new line is printed.
"""

import argparse
import ast
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from copy import copy
from pathlib import Path
from typing import Any, Final

from tests.size import ROOT, git

_PAIRS: Final = (
    *((ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.In, ast.NotIn)),
    *((ast.Is, ast.IsNot), (ast.And, ast.Or), (ast.Add, ast.Sub), (ast.Mult, ast.Div)),
    (ast.FloorDiv, ast.Mod),
)
_SWAPPED: Final[dict[type, Any]] = {**dict(_PAIRS), **{b: a for a, b in _PAIRS}}
#: Keywords whose change changes nothing that a test could see, or only at times.
_SEEN_BY_NOBODY: Final = {"strict", "frozen", "slots", "kw_only", "maintain_order"}


def faults_in(node: ast.AST) -> Iterator[tuple[ast.expr | ast.Return, str]]:
    """The expressions and returns below a node, each with what may stand in its place."""
    if isinstance(node, ast.expr | ast.Return) and (changed := _changed(node)) is not None:
        yield node, changed
    if isinstance(node, ast.JoinedStr) or getattr(node, "arg", "") in _SEEN_BY_NOBODY:
        return  # before Python 3.12 nobody knows where the parts of an f-string stand
    for field, value in ast.iter_fields(node):
        if field not in {"annotation", "returns", "decorator_list"}:
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from faults_in(child)


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


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("room", help="collect say, or a folder of it")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", help="of the draw (default: the commit's hash)")
    asked = parser.parse_args()
    seed = asked.seed or git("rev-parse", "HEAD").decode().strip()
    faults: list[tuple[str, ast.expr | ast.Return, str]] = []
    for name in git("ls-files", f"{asked.room}/*.py").decode().splitlines():
        text = (ROOT / name).read_text("utf-8")
        found = [
            each for each in faults_in(ast.parse(text)) if each[0].lineno == each[0].end_lineno
        ]
        faults += [(name, node, changed) for node, changed in found]
    draw, survived = random.Random(seed), 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        tree = Path(folder) / "tree"
        shutil.copytree(ROOT, tree, symlinks=True, ignore=shutil.ignore_patterns("out", ".*"))
        (Path(folder) / "shared").symlink_to((ROOT.parent / "shared").resolve())
        named = re.compile(rf"dynamiccl[.-]{asked.room.replace('/', '.')}\b")
        paths = [p for p in tree.glob("tests/**/test_*.py") if not {"gpu", "cluster"} & {*p.parts}]
        near = [str(p) for p in sorted(paths) if named.search(p.read_text("utf-8"))]
        # Longer than any room's tests take; it ends their workers, too.
        tests = ["timeout", "1200", sys.executable, "-P", "-m", "pytest", "-xq", "-rfE", "-n2"]
        environment = os.environ | {"PYTHONPATH": str(tree)}

        def failed() -> str:
            """The first test that fails, or ""."""
            command = [*tests, "-pno:randomly", *near]
            done = subprocess.run(
                command, cwd=tree, env=environment, stdout=subprocess.PIPE, text=True, check=False
            )
            told = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
            return told[1] if told else done.stdout[-2000:] if done.returncode else ""

        if by := failed():
            raise SystemExit(f"without a fault: {by}")
        for name, node, changed in draw.sample(faults, asked.count):
            before = (tree / name).read_text("utf-8")
            lines = before.splitlines(keepends=True)
            line = lines[node.lineno - 1].encode()
            new = line[: node.col_offset] + changed.encode() + line[node.end_col_offset :]
            lines[node.lineno - 1] = new.decode()
            (tree / name).write_text("".join(lines), encoding="utf-8")
            by = failed()
            (tree / name).write_text(before, encoding="utf-8")
            survived += not by
            told = f"found by {by}" if by else f"no test fails: {new.decode().strip()}"
            sys.stdout.write(f"{name}:{node.lineno}: {told}\n")
            sys.stdout.flush()
    sys.stdout.write(f"seed {seed}: {asked.count - survived} of {asked.count} found\n")


if __name__ == "__main__":
    main()
