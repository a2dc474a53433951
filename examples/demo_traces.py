"""Traces that users have already, as calls and steps: `make demo-traces`.

Takes in the published traces of PyTorch's profiler that are there: whole ones beside the checkout,
in ../shared/data/traces, else the excerpts in tests/data. Each import is the command that a user
would type.
"""

import argparse
import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

import polars as pl
from rich.console import Console
from rich.table import Table

from dynamiccl.datasets import store

ROOT: Final = Path(__file__).resolve().parent.parent
WHOLE: Final = ROOT.parent / "shared" / "data" / "traces"
EXCERPTS: Final = ROOT / "tests" / "data" / "traces"
#: Traces of one job belong into one import: job, what they are, the
#: beginnings of their names, and what they do not tell.
JOBS: Final = (
    ("resnet", "ResNet, one rank of two", "hta_nccl_data", ()),
    # The trace does not tell how many ranks a group has; its archive has all 8.
    ("dlrm", "DLRM, 8 ranks", "param_dlrm_kineto", ("--ranks", "8")),
)
console = Console(width=110)


def command(*arguments: str) -> Any:
    """Run one of our commands, showing it; return its JSON."""
    words = ["dynamiccl-collect", *arguments]
    console.print(f"$ {' '.join(words)}", style="bold", soft_wrap=True, highlight=False)
    executable = str(Path(sys.executable).parent / words[0])
    done = subprocess.run([executable, *arguments, "--json"], check=True, stdout=subprocess.PIPE)
    return json.loads(done.stdout)


def main() -> None:
    """Import, and say what was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=ROOT / "out" / "demo-traces")
    out: Path = parser.parse_args().out
    shutil.rmtree(out, ignore_errors=True)
    folder = WHOLE if WHOLE.is_dir() else EXCERPTS
    started = time.monotonic()
    for job, what, name, known in JOBS:
        files = [path for path in sorted(folder.iterdir()) if path.name.startswith(name)]
        for path in files:
            unpacked = out / "traces" / job
            if path.name.endswith(".tar.gz"):
                shutil.unpack_archive(path, unpacked, filter="data")
            else:
                unpacked.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, unpacked)
        found = command("import", str(out / "traces" / job), "--out", str(out / "data"),
                        "--system", "published", "--sweep", job, *known)  # fmt: skip
        console.print(
            f"{what}: {found['calls_written']} calls from {found['rank_records']} records of "
            f"ranks, {found['calls_timed']} with a time, {found['steps_written']} steps",
            highlight=False,
        )
        for reason, count in found["untimed"].items():
            console.print(f"  {count} without a time: {reason}", highlight=False)
    calls = store.read(out / "data", "calls")
    show_calls(calls)
    show_steps(store.read(out / "data", "steps"))
    if folder == EXCERPTS:
        console.print("(excerpts hold no compute kernels: nothing covers their communication)")
    console.print(f"\ndata  {out / 'data'}\ndone in {time.monotonic() - started:.1f} s")


def show_calls(calls: pl.DataFrame) -> None:
    """One line a kind of call: how many, how large, and the least time that is known."""
    table = Table("job", "source", "collective", "calls", "bytes", "asks a tuner", "time, us")
    keys = ("sweep", "source", "collective", "asks_tuner")
    groups = calls.group_by(keys).agg(
        count=pl.len(),
        least=pl.col("size_bytes").min(),
        most=pl.col("size_bytes").max(),
        time=pl.col("time_us").median(),
        bound=pl.col("time_at_most_us").median(),
    )
    for row in groups.sort(keys, nulls_last=True).iter_rows(named=True):
        known = f"{row['time']:.1f}" if row["time"] is not None else None
        bound = f"at most {row['bound']:.1f}" if row["bound"] is not None else "not known"
        asks = {True: "yes", False: "no", None: "not known"}[row["asks_tuner"]]
        sizes = f"{row['least']} to {row['most']}"
        told = (row["sweep"], row["source"], row["collective"], str(row["count"]), sizes, asks)
        table.add_row(*told, known or bound)
    console.print(table)


def show_steps(steps: pl.DataFrame) -> None:
    """One line a job: how much of a step is communication, and how much of it nothing covers."""
    table = Table("job", "ranks", "steps", "step, ms", "communication, ms", "exposed, ms")
    columns = ("step_us", "communication_us", "exposed_us")
    groups = steps.group_by("sweep").agg(
        pl.col("rank").n_unique(), pl.len().alias("steps"), *(pl.col(c).median() for c in columns)
    )
    for row in groups.sort("sweep").iter_rows(named=True):
        times = [f"{row[name] / 1e3:.1f}" for name in columns]
        table.add_row(row["sweep"], str(row["rank"]), str(row["steps"]), *times)
    console.print(table)


if __name__ == "__main__":
    main()
