"""Time and memory of reading a large Chrome trace of PyTorch's profiler.

    python benchmarks/bench_traces.py [--gib G]

The trace is made here, in libkineto's layout, by a stated rule: for each collective as many other
events as a published trace of ResNet on two GPUs has (HolisticTraceAnalysis, nccl_data.json.gz):
683 operations of the host, 416 calls of the CUDA runtime, 596 ends of flow arrows, 128 kernels that
compute; eight collectives are a step. It is read in a process of its own, whose peak of resident
memory counts.

Writes out/bench/traces.json.
"""

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from harness import write_result

from dynamiccl.collect.traces import read_traces

#: For each collective.
OPERATIONS, RUNTIME_CALLS, ARROWS, KERNELS = 683, 416, 596, 128
COLLECTIVES_PER_STEP: Final = 8
PART_US: Final = 10_000.0
HEAD: Final = {
    "schemaVersion": 1,
    "deviceProperties": [{"id": 0, "name": "NVIDIA H100", "computeMajor": 9, "computeMinor": 0}],
    "distributedInfo": {"backend": "nccl", "rank": 0, "world_size": 8},
    "baseTimeNanoseconds": 1_700_000_000_000_000_000,
}
COMM: Final = {
    "Collective name": "allreduce",
    "In msg nelems": 6637568,
    "Out msg nelems": 6637568,
    "Group size": 8,
    "dtype": "BFloat16",
    "Process Group Name": "0",
    "Process Group Description": "default_pg",
}


def event(cat: str, name: str, at: float, dur: float, tid: int, **args: Any) -> str:
    """One event as libkineto lays it out."""
    return (
        f'  {{\n    "ph": "X", "cat": "{cat}", "name": {json.dumps(name)}, '
        f'"pid": 7, "tid": {tid},\n'
        f'    "ts": {at:.3f}, "dur": {dur:.3f},\n    "args": {{\n      {json.dumps(args)[1:-1]}\n'
        "    }\n  }"
    )


def part(number: int, begin_us: float) -> Iterator[str]:
    """The events around one collective, which is the `number`-th of the trace."""
    first = number * 1024
    for place in range(OPERATIONS):
        at, shapes = begin_us + 12.0 * place, [[8, 4096, 4096], [4096, 14336]]
        told = {"External id": first + place, "Sequence number": number, "Input Dims": shapes}
        yield event("cpu_op", "aten::mm", at, 11.0, 1, **told)
    for place in range(RUNTIME_CALLS):
        at, ident = begin_us + 20.0 * place, first + place
        name = "cudaLaunchKernel" if place < KERNELS else "cudaEventQuery"
        launch = {"External id": ident, "cbid": 211, "correlation": ident}
        yield event("cuda_runtime", name, at, 5.0, 1, **launch)
    for place in range(ARROWS):
        yield (
            f'  {{\n    "ph": "f", "id": {first + place}, "pid": 7, "tid": 1, '
            f'"ts": {begin_us:.3f},\n    "cat": "ac2g", "name": "ac2g", "bp": "e"\n  }}'
        )
    for place in range(KERNELS):
        shape = {"grid": [132, 1, 1], "block": [384, 1, 1], "device": 0, "stream": 7}
        more = {"registers per thread": 168, "shared memory": 0, "warps per SM": 12.0}
        name = f"void cutlass::Kernel<cutlass_80_tensorop_bf16_s16816gemm_128x{place}_f2f>(Params)"
        at, ident = begin_us + 60.0 * place + 10, first + place
        yield event("kernel", name, at, 50.0, 7, correlation=ident, **shape, **more)
    ident, at = first + 1000, begin_us + 250.0
    yield event("cpu_op", "record_param_comms", at, 20.0, 2, **{"External id": ident}, **COMM)
    yield event("cuda_runtime", "cudaLaunchKernelExC", at + 5, 5.0, 2, correlation=ident)
    shape = {"grid": [24, 1, 1], "block": [544, 1, 1], "device": 0, "stream": 20}
    name = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
    told = {"correlation": ident, "Seq": number + 1, **shape, **COMM}
    yield event("kernel", name, at + 12, 120.0, 20, **told)


def make(path: Path, size_bytes: int) -> int:
    """Write a trace of about `size_bytes`; return the collectives in it."""
    parts, step_us = 0, COLLECTIVES_PER_STEP * PART_US
    with path.open("w", encoding="utf-8") as file:
        file.write(json.dumps(HEAD)[:-1] + ',\n  "traceEvents": [\n')
        while file.tell() < size_bytes:
            if parts % COLLECTIVES_PER_STEP == 0:
                number = parts // COLLECTIVES_PER_STEP
                name = f"ProfilerStep#{number}"
                file.write(event("user_annotation", name, number * step_us, step_us, 1) + ",\n")
            file.write(",\n".join(part(parts, parts * PART_US)) + ",\n")
            parts += 1
        file.write(event("user_annotation", "ProfilerStep#1000000", parts * PART_US, 1.0, 1))
        file.write("\n  ]\n}\n")
    return parts


def read(path: Path) -> None:
    """Read it, and print what that took as JSON: the process that is measured."""
    empty_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    began = time.perf_counter()
    found = read_traces([path], system="bench", sweep="bench")
    seconds = time.perf_counter() - began
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    figures = {"seconds": seconds, "peak_mib": peak_mib, "empty_mib": empty_mib}
    print(json.dumps({**figures, "calls": found.calls.num_rows, "steps": found.steps.num_rows}))


def main() -> None:
    """Make, read, compare and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gib", type=float, default=2e9 / (1 << 30))
    parser.add_argument("--read", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read is not None:
        read(arguments.read)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        parts = make(path, int(arguments.gib * (1 << 30)))
        size_mb = path.stat().st_size / 1e6
        command = [sys.executable, __file__, "--read", str(path)]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE)
    found = json.loads(done.stdout)
    assert found["calls"] == parts
    write_result(
        "traces",
        {
            "kineto_mb_per_s": size_mb / found["seconds"],
            "kineto_peak_mib": found["peak_mib"],
            "kineto_empty_process_mib": found["empty_mib"],
            "kineto_mb": size_mb,
            "kineto_seconds": found["seconds"],
            "kineto_calls": found["calls"],
        },
    )


if __name__ == "__main__":
    main()
