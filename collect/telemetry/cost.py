"""What sampling costs: CPU time of a real sampler process, as the kernel counts it."""

import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.collect.telemetry.counters import CLOCK_REASONS
from dynamiccl.collect.telemetry.sampler import sampler_argv
from dynamiccl.collect.telemetry.samples import Samples, read_samples
from dynamiccl.errors import MachineError

#: A sampler that has not begun to read after so long will not.
_START_S: Final = 30.0


@dataclass(frozen=True, slots=True)
class SamplerCost:
    """What a sampler used while it sampled (its start, about 0.1 s once, is left out)."""

    #: Share of one core for the whole process, 0..1.
    cpu_share: float
    num_gpus: int
    ticks_per_s: float
    #: The longest time between two ticks, in seconds.
    longest_gap_s: float

    @property
    def cpu_share_per_gpu(self) -> float:
        """Share of one core for each GPU; of a node without one, the whole."""
        return self.cpu_share / max(1, self.num_gpus)


def sampler_cpu_share(
    seconds: float, rate_hz: float = 10.0, env: Mapping[str, str] | None = None
) -> SamplerCost:
    """Run a sampler of this node for so long and measure it; `env` is its whole environment.

    Raises MachineError when it does not start.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.jsonl"
        with subprocess.Popen(sampler_argv(path, rate_hz), stdin=subprocess.PIPE, env=env) as child:
            try:
                _await_first_reading(child, path)
                used, began = _cpu_seconds(child.pid), time.monotonic()
                time.sleep(seconds)
                used = _cpu_seconds(child.pid) - used
                elapsed = time.monotonic() - began
            finally:
                child.terminate()
        return _cost(read_samples(path), used / elapsed)


def _cost(samples: Samples, cpu_share: float) -> SamplerCost:
    gpus = samples.counter(CLOCK_REASONS)
    # Every fast column has one value each tick: any of the longest series shows the ticks.
    times = max((s.times_s for s in samples.series.values()), key=len)
    gaps = times[1:] - times[:-1]
    return SamplerCost(
        cpu_share=cpu_share,
        num_gpus=len(gpus),
        ticks_per_s=float(1.0 / gaps.mean()),
        longest_gap_s=float(gaps.max()),
    )


def _await_first_reading(child: subprocess.Popen[bytes], path: Path) -> None:
    until = time.monotonic() + _START_S
    while not (path.is_file() and b'"fast"' in path.read_bytes()):
        if child.poll() is not None or time.monotonic() > until:
            raise MachineError(
                f"the sampler did not begin to read within {_START_S:g} s; run it by hand: "
                f"{' '.join(str(word) for word in sampler_argv('samples.jsonl'))}"
            )
        time.sleep(0.01)


def _cpu_seconds(pid: int) -> float:
    """Processor time of all threads of a process, to the nanosecond (the kernel's run queue)."""
    folder = Path(f"/proc/{pid}/task")
    spent = [int((task / "schedstat").read_text().split()[0]) for task in folder.iterdir()]
    return sum(spent) / 1e9
