"""What the telemetry sampler costs: processor time of one real sampler process.

    python benchmarks/bench_sampler.py

Against the fake NVML of the tests with eight GPUs at 10 Hz, since the driver's own share can only
be measured with a driver. What is left for it is a figure too: how much processor time each of the
sampler's NVML calls may take before a GPU costs 1 % of one core. Writes out/bench/sampler.json.
"""

import os
import subprocess
import tempfile
from pathlib import Path

from harness import write_result

from dynamiccl.collect.telemetry.cost import sampler_cpu_share

SOURCE = Path(__file__).resolve().parents[1] / "tests" / "fakes" / "nvml" / "fake_nvml.c"
NUM_GPUS = 8
RATE_HZ = 10.0
SECONDS = 20.0
#: NVML calls for one GPU: two clocks, power, temperature, utilisation, reasons and one for NVLink
#: fields every tick; ECC, MIG and one for NVLink errors every second.
CALLS_PER_S = 7 * RATE_HZ + 3
BUDGET = 0.01


def main() -> None:
    """Build the fake, measure, write."""
    with tempfile.TemporaryDirectory() as folder:
        library = Path(folder) / "libnvidia-ml.so.1"
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", library, SOURCE], check=True)
        env = {**os.environ, "LD_LIBRARY_PATH": folder, "FAKE_NVML_GPUS": str(NUM_GPUS)}
        cost = sampler_cpu_share(SECONDS, RATE_HZ, env)
    left = BUDGET - cost.cpu_share_per_gpu
    write_result(
        "sampler",
        {
            "sampler_cpu_share": cost.cpu_share_per_gpu,
            "whole_process_cpu_share": cost.cpu_share,
            "num_gpus": cost.num_gpus,
            "ticks_per_s": cost.ticks_per_s,
            "longest_gap_ms": 1000.0 * cost.longest_gap_s,
            "cpu_us_left_for_each_nvml_call": 1e6 * left / CALLS_PER_S,
            "nvml": "fake",
        },
    )


if __name__ == "__main__":
    main()
