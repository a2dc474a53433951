"""Overhead of a sweep beside the benchmark's own time, and the process launches that it saves.

    python benchmarks/bench_collect.py

*Launches saved*: the plan of the shipped example sweep, one process for the grid against one for
each config. *Overhead*: a sweep of the nccl-tests stand-in through the real runner, journal,
sampler and plugin; everything that is not spent inside the benchmark's processes, start of the
command included, over the measurements taken. *Rows*: text of the stand-in, made into measurement
rows and checked block by block. All else comes from benchmarks of their own (`OTHERS`).

Writes out/bench/collect.json.
"""

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from harness import OUT, ROOT, write_result

from dynamiccl.collect import launch, launchers
from dynamiccl.collect.cli import RunOptions, start_sweep
from dynamiccl.collect.plan import make_plan
from dynamiccl.collect.sweep import load_sweep, parse_sweep
from dynamiccl.serve.build import build_plugin
from tests.fakes.nccl_tests.install import install_stand_in

EXAMPLE: Final = ROOT / "examples" / "slurm_h100.toml"
SWEEP: Final = """
name = "overhead"
system = "stand-in"
collectives = ["AllReduce", "AllGather"]
groups = [{ num_nodes = 1, ranks_per_node = 8 }]
sizes = { min = "1K", max = "64M", factor = 2 }
algorithms = ["Ring", "Tree", "NVLS"]
num_channels = [0, 2, 4, 8, 16]
cycles = 3
# The stand-in is slow; its own time is not what is measured.
small_iterations = 20
"""
#: Figures of other benchmarks.
OTHERS: Final = {
    "strategies": ("measurements_saved_ratio_at_2pct",),
    "traces": ("kineto_mb_per_s", "kineto_peak_mib"),
    "compare": ("compare_recall_range_3_percent_5_runs", "compare_false_alarms_5_runs"),
    "forecast": ("forecast_coverage",),
    "health": ("health_recall", "health_false_alarms"),
}
#: Rows of the parsing benchmark: cycles of a walk of 17 sizes.
CYCLES: Final = 3000
SIZES: Final = tuple(1 << exponent for exponent in range(10, 27))


def overhead_ms() -> tuple[float, int]:
    """Harness overhead in ms for each measurement, and the number of measurements."""
    inside = 0.0
    real = launchers.run_process

    def timed(*arguments: Any, **more: Any) -> int | None:
        nonlocal inside
        began = time.perf_counter()
        finished = real(*arguments, **more)
        inside += time.perf_counter() - began
        return finished

    # The one place where a benchmark's process is waited for.
    launch.run_process = timed  # type: ignore[attr-defined]
    plugin = build_plugin(ROOT / "out" / "plugin").with_name("libnccl-tuner-dynamiccl-sweep.so")
    sweep = parse_sweep(f'{SWEEP}\n[runner]\nplugin = "{plugin}"\n', where="bench")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        options = RunOptions(
            sweep_file=EXAMPLE, out=out / "data", nccl_tests_dir=install_stand_in(out / "bin")
        )
        began = time.perf_counter()
        summary = start_sweep(sweep, options)
        seconds = time.perf_counter() - began
    # Both halves of a block are one measurement of the sweep.
    measured = summary["rows_by_status"]["ok"] // 2
    return 1000.0 * (seconds - inside) / measured, measured


def rows_per_s() -> tuple[float, int]:
    """Rows parsed from text each second, and the number of rows."""
    lines = [_row(size) for _ in range(CYCLES) for size in SIZES]
    began = time.perf_counter()
    blocks, _ = launch.read_rows(lines, Path("absent"), sizes=SIZES)
    seconds = time.perf_counter() - began
    rows = sum(len(block) for block in blocks)
    assert rows == 2 * len(lines)
    return rows / seconds, rows


def _row(size_bytes: int) -> str:
    """A consistent row of nccl-tests output."""
    halves = []
    for time_us in (20.0 + size_bytes / 1e5, 21.0 + size_bytes / 1e5):
        algbw = size_bytes / time_us / 1000.0
        halves.append(f"{time_us:7.2f} {algbw:6.2f} {1.75 * algbw:6.2f} 0")
    return f"{size_bytes:12} {size_bytes // 4:12} float sum -1 {'  '.join(halves)}"


def figures_of_others() -> Iterator[tuple[str, float]]:
    """Figures of other benchmarks, which are run if they have no result yet."""
    for benchmark, names in OTHERS.items():
        path = OUT / f"{benchmark}.json"
        if not path.is_file():
            script = f"{ROOT}/benchmarks/bench_{benchmark}.py"
            subprocess.run([sys.executable, script], check=True)
        told = json.loads(path.read_text(encoding="utf-8"))
        yield from ((name, float(told[name])) for name in names)


def main() -> None:
    """Measure and write."""
    plan = make_plan(load_sweep(EXAMPLE))
    per_trial_ms, measured = overhead_ms()
    parsed_per_s, parsed = rows_per_s()
    write_result(
        "collect",
        {
            "launches_saved_ratio": plan["launches_saved_ratio"],
            "launches": plan["launches"],
            "launches_one_per_config": plan["launches_one_per_config"],
            **dict(figures_of_others()),
            "overhead_per_trial_ms": per_trial_ms,
            "overhead_trials": measured,
            "rows_per_s": parsed_per_s,
            "rows": parsed,
        },
    )


if __name__ == "__main__":
    main()
