"""How many one-line faults in a room the tests find.

    python -m tests.faults collect                        thirty faults that the commit draws
    python -m tests.faults collect --count 3 --seed 7     fewer, and others
    python -m tests.faults collect --cluster              by tests on a real Slurm, too

Without `--cluster` a fault that those alone would find counts as not found: they wait for Slurm for
minutes, once for each fault that no test finds.

A fault is one changed expression: a comparison, a constant, a boolean, arithmetic, or what is
returned. It is made in a copy of the tree, where tests run until one fails: first those that name
the changed module, then the others that name the room. Without a fault all of them must pass, and
say by their time how long they may take. What no test finds is printed as a diff.
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
import xml.etree.ElementTree as ET
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from copy import copy
from dataclasses import dataclass
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
_WORKERS: Final = "-n2"


@dataclass(frozen=True)
class Fault:
    """A file's text with one line changed."""

    name: str
    line: int
    before: str
    after: str

    def diff(self) -> str:
        old, new = (text.splitlines(keepends=True) for text in (self.before, self.after))
        return "".join(difflib.unified_diff(old, new, self.name, self.name, n=1))


def faults_in(name: str, text: str) -> Iterator[Fault]:
    """Every fault that can be made in a file."""
    lines = text.splitlines(keepends=True)
    for node, changed in _changes(ast.parse(text)):
        if node.lineno != node.end_lineno:
            continue
        line = lines[node.lineno - 1].encode()
        line = line[: node.col_offset] + changed.encode() + line[node.end_col_offset :]
        after = [*lines[: node.lineno - 1], line.decode(), *lines[node.lineno :]]
        yield Fault(name, node.lineno, text, "".join(after))


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


class Tree:
    """A copy of the tree, and the tests of it that name a room: their files -> their texts."""

    def __init__(self, room: str, folder: Path, left_out: Set[str]) -> None:
        self.root = folder / "tree"
        for name in filter(None, git("ls-files", "-z").decode().split("\0")):
            if (ROOT / name).is_symlink() or (ROOT / name).is_file():
                (self.root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, self.root / name, follow_symlinks=False)
        (folder / "shared").symlink_to((ROOT.parent / "shared").resolve())
        paths = sorted(self.root.glob("tests/**/test_*.py"))
        paths = [path for path in paths if not left_out & {*path.parts}]
        texts = {str(path.relative_to(self.root)): path.read_text("utf-8") for path in paths}
        named = re.compile(rf"dynamiccl[.-]{room.replace('/', '.')}\b")
        self.tests = {n: t for n, t in texts.items() if f"/{room}/" in n or named.search(t)}
        self.took_s: dict[str, float] = defaultdict(float)

    def begin(self) -> str:
        """Run the tests without a fault and keep how long each file takes; what failed, or ""."""
        report = self.root / "out" / "faults.xml"
        failed = self._run([*self.tests], [_WORKERS, f"--junitxml={report}"], None)
        for case in ET.parse(report).getroot().iter("testcase"):
            self.took_s[case.attrib["classname"].replace(".", "/") + ".py"] += float(
                case.attrib["time"]
            )
        return failed

    def failed_with(self, fault: Fault) -> str:
        """What a fault makes fail, or ""."""
        package, _, stem = fault.name.removesuffix(".py").replace("/", ".").rpartition(".")
        module = rf"dynamiccl\.{package}\.{stem}\b|from dynamiccl\.{package} import .*\b{stem}\b"
        near = [name for name, text in self.tests.items() if re.search(module, text)]
        far = [name for name in self.tests if name not in near]
        near += [f"dynamiccl/{fault.name}"] if ">>>" in fault.before else []
        path = self.root / fault.name
        path.write_text(fault.after, encoding="utf-8")
        try:
            found = self._run(near, [], self._limit_s(near)) if near else ""
            return found or self._run(far, [_WORKERS], self._limit_s(far))
        finally:
            path.write_text(fault.before, encoding="utf-8")

    def _limit_s(self, names: Sequence[str]) -> float:
        return 60 + 3 * sum(self.took_s[name] for name in names)

    def _run(self, names: Sequence[str], options: Sequence[str], limit_s: float | None) -> str:
        """The first test that fails, that tests did not end in time, or ""."""
        command = [sys.executable, "-P", "-m", "pytest", "-x", "-q", "-pno:randomly", "-rfE"]
        with subprocess.Popen(
            [*command, *options, *names],
            cwd=self.root,
            env=os.environ | {"PYTHONPATH": str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                said, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                return f"no end in {limit_s:.0f} s"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", said, re.MULTILINE)
        if failed is not None:
            return failed[1]
        return "" if process.returncode in {0, pytest.ExitCode.NO_TESTS_COLLECTED} else said[-2000:]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    parser.add_argument("room", help="collect say, or a folder of it, collect/strategies")
    parser.add_argument("--count", type=int, default=30)
    parser.add_argument("--seed", help="of the draw (default: the commit's hash)")
    parser.add_argument("--cluster", action="store_true", help="run tests/cluster, too")
    asked = parser.parse_args()
    seed = asked.seed or git("rev-parse", "HEAD").decode().strip()
    lines: dict[tuple[str, int], list[Fault]] = defaultdict(list)
    for name in git("ls-files", f"{asked.room}/*.py").decode().splitlines():
        for fault in faults_in(name, (ROOT / name).read_text(encoding="utf-8")):
            lines[fault.name, fault.line].append(fault)
    draw = random.Random(seed)
    drawn = [draw.choice(lines[line]) for line in draw.sample(sorted(lines), asked.count)]
    survived = 0
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        left_out = {"gpu"} if asked.cluster else {"gpu", "cluster"}
        tree = Tree(asked.room, Path(folder), left_out)
        if failed := tree.begin():
            raise SystemExit(f"without a fault: {failed}")
        for number, fault in enumerate(drawn, 1):
            failed = tree.failed_with(fault)
            survived += not failed
            found = f"found by {failed}" if failed else f"no test fails\n{fault.diff()}"
            sys.stdout.write(f"{number}/{asked.count} {fault.name}:{fault.line}: {found}\n")
            sys.stdout.flush()
    sys.stdout.write(f"seed {seed}: {asked.count - survived} of {asked.count} found\n")


if __name__ == "__main__":
    main()
