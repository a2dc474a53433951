"""Runs the soak tests one after the other: `make soak`.

    python -m tests.soak                             all of it, recorded in soak_runs.json
    python -m tests.soak --only fuzz --seconds 3600  those with `fuzz` in their name
    python -m tests.soak --slice 240                 a part of 240 s that the commit chooses

One entry is one test function with all of its parameters, run by a pytest of its own. A slice takes
entries in the order of their names, from a place that the commit's hash gives.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).resolve().parents[1]
RUNS: Final = Path(__file__).with_name("soak_runs.json")
#: Of an entry that was never run whole.
_UNKNOWN_S: Final = 60.0
#: A machine may be so much slower than the one of the record.
_MARGIN: Final = 1.5
#: What a pytest that was interrupted may take to end.
_END_S: Final = 30.0
#: A test that goes on for as long as it is told is told so many seconds in a slice.
_SLICE_SECONDS: Final = 10


def entries(folder: Path = ROOT / "tests", files: str = "test_*.py") -> list[str]:
    """`file.py::function` of every test in a folder that is marked `soak`, sorted."""
    paths = [str(p) for p in folder.rglob(files) if "mark.soak" in p.read_text("utf-8")]
    command = [sys.executable, "-P", "-m", "pytest", "--collect-only", "-m", "soak", *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    names = [line.partition("[")[0] for line in done.stdout.splitlines() if "::" in line]
    return sorted(set(names))


def run_entry(name: str, seed: int, seconds: float, limit_s: float | None = None) -> int | None:
    """pytest's exit code; None where it was still running after `limit_s`.

    With a limit pytest's lines are shown at the end, and only those of an entry that was done: the
    summary of one that was interrupted ("no tests ran") is not a result.
    """
    command = [sys.executable, "-P", "-m", "pytest", "-m", "soak", "-rs"]
    command += [f"--soak-seed={seed}", f"--soak-seconds={seconds:g}", name]
    kept = None if limit_s is None else subprocess.PIPE
    with subprocess.Popen(
        command, cwd=ROOT, start_new_session=True, stdout=kept, text=True
    ) as process:
        try:
            lines, _ = process.communicate(timeout=limit_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C: fixtures end what they started
            try:
                process.communicate(timeout=_END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
            return None
        if lines:
            say(lines.rstrip())
        return process.returncode


def rotated(names: Sequence[str], commit: str) -> list[str]:
    """The names from the place that the commit gives, round to the one before it.

    >>> rotated(["a", "b", "c"], "4f")
    ['b', 'c', 'a']
    """
    begin = int(commit, 16) % len(names)
    return [*names[begin:], *names[:begin]]


def head() -> str:
    done = subprocess.run(
        ["git", "-c", "safe.directory=*", "rev-parse", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()


def read_runs() -> dict[str, Any]:
    """What the last whole runs were: by entry its seconds, commit and day."""
    found: dict[str, Any] = json.loads(RUNS.read_text(encoding="utf-8")) if RUNS.exists() else {}
    return found


def run_slice(names: Sequence[str], budget_s: float, seed: int) -> int:
    """As many entries as are expected to fit; what takes longer than the budget is never begun."""
    runs, until, failed = read_runs(), time.monotonic() + budget_s, 0
    for name in rotated(names, head()):
        left = until - time.monotonic()
        if _MARGIN * runs.get(name, {}).get("seconds", _UNKNOWN_S) > left:
            continue
        say(f"soak: again with: make soak ONLY='{name}' SEED={seed} SECONDS={_SLICE_SECONDS}")
        code = run_entry(name, seed, _SLICE_SECONDS, left)
        if code is None:
            say(f"soak: {name} was not done in the {left:.0f} s that were left")
            break
        failed += code != 0
    return failed


def run_all(names: Sequence[str], seed: int, seconds: float) -> int:
    """Every entry, however long it takes; what passed is recorded."""
    runs, failed = read_runs(), 0
    for number, name in enumerate(names, 1):
        say(f"soak {number}/{len(names)}: {name} SEED={seed} SECONDS={seconds:g}")
        started = time.monotonic()
        code = run_entry(name, seed, seconds)
        took = time.monotonic() - started
        say(f"soak {number}/{len(names)}: {'passed' if code == 0 else 'FAILED'} in {took:.0f} s")
        failed += code != 0
        if code == 0:
            runs[name] = {
                "seconds": round(took),
                "asked_seconds": seconds,
                "seed": seed,
                "commit": head()[:12],
                "day": datetime.now(UTC).date().isoformat(),
            }
            RUNS.write_text(json.dumps(dict(sorted(runs.items())), indent=1) + "\n")
    say(f"{len(names) - failed} passed, {failed} failed")
    return failed


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description="Run soak tests.")
    parser.add_argument("--only", default="", help="entries whose name holds this")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=60, help="of each that has no end")
    parser.add_argument("--slice", type=float, help="seconds for a part that the commit chooses")
    arguments = parser.parse_args()
    names = [name for name in entries() if arguments.only in name]
    if not names:
        say(f"no soak test has '{arguments.only}' in its name")
        return 2
    if arguments.slice is not None:
        return int(run_slice(names, arguments.slice, arguments.seed) > 0)
    return int(run_all(names, arguments.seed, arguments.seconds) > 0)


if __name__ == "__main__":
    sys.exit(main())
