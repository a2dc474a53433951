"""Overhead of a sweep beside the benchmark's own time, and the process launches that it saves.

    python benchmarks/bench_collect.py

*Launches saved*: the plan of the shipped example sweep, one process for the grid against one for
each config. *Overhead*: a sweep of the nccl-tests stand-in through the real runner, journal,
sampler and plugin; everything that is not spent inside the benchmark's processes, start of the
command included, over the measurements taken.

Writes out/bench/collect.json.
"""

import tempfile
import time
from pathlib import Path
from typing import Any, Final

from harness import ROOT, write_result

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


def main() -> None:
    """Measure and write."""
    plan = make_plan(load_sweep(EXAMPLE))
    per_trial_ms, measured = overhead_ms()
    write_result(
        "collect",
        {
            "launches_saved_ratio": plan["launches_saved_ratio"],
            "launches": plan["launches"],
            "launches_one_per_config": plan["launches_one_per_config"],
            "overhead_per_trial_ms": per_trial_ms,
            "overhead_trials": measured,
        },
    )


if __name__ == "__main__":
    main()
