"""The sampler: one process per node, beside the trials, that writes readings of GPUs and NICs.

    python -m dynamiccl.collect.telemetry.sampler --out FILE [--rate-hz 10] [--pcie-period-s 10]

It is a process of its own so that it never delays a trial: it runs at low priority, holds no lock
that a trial waits for, and costs under 1 % of one core per GPU (benchmarks/bench_sampler.py). No
driver, no nvidia-ml-py or no permission is recorded as a fact, once; NICs are read all the same.

It ends on SIGTERM or SIGINT, or with whoever started it (see companion.py).
"""

import argparse
import os
import platform
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamiccl import cli
from dynamiccl.collect.telemetry.collectors import Group, Reading, Refused
from dynamiccl.collect.telemetry.companion import Ending
from dynamiccl.collect.telemetry.gpus import gpu_readings
from dynamiccl.collect.telemetry.nics import SYSFS, nic_readings
from dynamiccl.collect.telemetry.nvml import Nvml
from dynamiccl.collect.telemetry.record import FORMAT, KEY_PERIOD_S, Recorder, tidy

#: Error counters and modes change rarely; this often is enough to place a change at a launch.
SLOW_PERIOD_S: Final = 1.0
#: Below the trials and everything else of the user's.
_NICENESS: Final = 10
_HOST: Final = "{host}"


def sampler_argv(
    out: str | Path, rate_hz: float = 10.0, *, pcie_period_s: float = 10.0
) -> list[str]:
    """Argument vector of a sampler; `{host}` in `out` stands for the node's name."""
    return [
        *(sys.executable, "-m", "dynamiccl.collect.telemetry.sampler"),
        *("--out", str(out), "--rate-hz", f"{rate_hz:g}", "--pcie-period-s", f"{pcie_period_s:g}"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Sample until told to end."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", required=True, help="file to append to; {host} = this node")
    parser.add_argument("--rate-hz", type=float, default=10.0)
    parser.add_argument("--pcie-period-s", type=float, default=10.0, help="0 = never")
    parser.add_argument("--sysfs", type=Path, default=SYSFS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if not 0 < options.rate_hz <= 100:
        parser.error(f"--rate-hz is {options.rate_hz:g}; give more than 0 and at most 100")
    if options.pcie_period_s and options.pcie_period_s < 10:
        parser.error(
            f"--pcie-period-s is {options.pcie_period_s:g}; a reading blocks for 20 ms, so give at "
            "least 10, or 0 for none"
        )
    path = Path(options.out.replace(_HOST, platform.node()))
    path.parent.mkdir(parents=True, exist_ok=True)
    os.nice(_NICENESS)
    with Ending() as ending, Recorder(path) as recorder:
        about: dict[str, Any] = {"format": FORMAT, "host": platform.node()}
        about |= {"rate_hz": options.rate_hz, "pid": os.getpid()}
        recorder.add({"sampler": about})
        readings = _all_readings(recorder, options.sysfs)
        plan = Plan(
            fast=Group("fast", readings.fast, recorder.error),
            slow=Group("slow", readings.slow, recorder.error),
            blocking=tuple(
                Group(f"pcie-{gpu[0].device}", gpu, recorder.error)
                for gpu in (readings.blocking if options.pcie_period_s else ())
            ),
            period_s=1.0 / options.rate_hz,
            pcie_period_s=options.pcie_period_s,
        )
        stop_pcie = start_pcie(plan, recorder)
        try:
            sample(plan, about, recorder, ending.wait)
        finally:
            stop_pcie()


@dataclass(frozen=True, slots=True)
class Plan:
    """What is read, and how often."""

    fast: Group
    slow: Group
    blocking: tuple[Group, ...]
    period_s: float
    pcie_period_s: float

    @property
    def columns(self) -> dict[str, list[tuple[str, str]]]:
        """(device, counter) of each group's values."""
        return {group.name: group.columns for group in (self.fast, self.slow, *self.blocking)}


def sample(
    plan: Plan, about: Mapping[str, Any], recorder: Recorder, rest: Callable[[float], bool]
) -> None:
    """Read the fast group every tick and the slow one every second.

    `rest` sleeps for so many seconds and says whether it is over. Ticks stay on their grid: one
    that took too long costs the ticks that it overran, and no more.
    """
    began = time.monotonic()
    slow_every = max(1, round(SLOW_PERIOD_S / plan.period_s))
    key_every = max(1, round(KEY_PERIOD_S / plan.period_s))
    tick = next_slow = next_key = 0
    while True:
        now_s = recorder.now()
        if tick >= next_key:
            recorder.key(about, plan.columns)
            next_key = (tick // key_every + 1) * key_every
        values = {"fast": tidy(plan.fast.read())}
        if tick >= next_slow:
            values["slow"] = tidy(plan.slow.read())
            next_slow = (tick // slow_every + 1) * slow_every
        recorder.add(values, time_s=now_s)
        tick = max(tick + 1, int((time.monotonic() - began) / plan.period_s))
        if rest(began + tick * plan.period_s - time.monotonic()):
            return


@dataclass(frozen=True, slots=True)
class _Readings:
    fast: list[Reading]
    slow: list[Reading]
    blocking: list[tuple[Reading, ...]]


def _all_readings(recorder: Recorder, sysfs: Path) -> _Readings:
    nic_fast, nic_slow = nic_readings(sysfs)
    found = _Readings(list(nic_fast), list(nic_slow), [])
    try:
        nvml = Nvml()
    except Refused as error:
        recorder.error("gpu", "nvml", str(error))
        return found
    for index in range(nvml.num_gpus):
        try:
            gpu = gpu_readings(nvml, index, recorder.error)
        except Refused as error:
            recorder.error(f"gpu{index}", "nvml", str(error))
            continue
        found.fast.extend(gpu.fast)
        found.slow.extend(gpu.slow)
        found.blocking.append(gpu.blocking)
    return found


def start_pcie(plan: Plan, recorder: Recorder) -> Callable[[], None]:
    """Read PCIe throughput in a thread that no tick waits for: each call blocks for 20 ms.

    The interpreter is free meanwhile (ctypes lets go of its lock), so that ticks are on time.
    Returns what ends the thread.
    """
    groups = [group for group in plan.blocking if group.columns]
    over = threading.Event()

    def loop() -> None:
        while not over.wait(plan.pcie_period_s):
            for group in groups:
                now_s = recorder.now()
                recorder.add({group.name: tidy(group.read())}, time_s=now_s)

    thread = threading.Thread(target=loop, name="pcie", daemon=True)
    if groups:
        thread.start()

    def stop() -> None:
        over.set()
        if groups:
            thread.join()

    return stop


if __name__ == "__main__":
    cli.run(main)
