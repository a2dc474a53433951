"""Time and memory of importing a million rows of nccl-tests text.

The text is made from a template: one long output of `all_reduce_perf -N 0` (the sizes again and
again), with times that vary from row to row and bandwidths that fit them. The import runs in a
process of its own, so that its peak memory is its own.

Run: python benchmarks/bench_import.py [ROWS]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from harness import write_result

_HEADER: Final = """\
# nccl-tests version 2.18.0 nccl-headers=22907 nccl-library=22907
# Collective test starting: all_reduce_perf
# nThread 1 nGpus 8 minBytes 8 maxBytes 17179869184 step: 2(factor) warmup iters: 1 iters: 20
#
# Using devices
{ranks}
#
#       size         count      type   redop    root     {half}     {half}
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)
"""
_HALF: Final = "time   algbw   busbw  #wrong"
_RANK: Final = (
    "#  Rank  {0} Group  0 Pid   4242 on    node01 device  {0} [0000:0{0}:00] NVIDIA H100"
)
_CHILD: Final = """\
import json, resource, sys, time
from pathlib import Path
from dynamiccl.collect.imports import ImportOptions, import_files
start = time.perf_counter()
options = ImportOptions(system="bench")
summary = import_files([Path(sys.argv[1])], Path(sys.argv[2]), options=options)
seconds = time.perf_counter() - start
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps({"seconds": seconds, "peak_rss_mib": peak, "rows": summary.rows_read,
                  "measurements": summary.measurements_written}))
"""


def _number(value: float, width: int) -> str:
    for decimals in (2, 1, 0):
        text = f"{value:.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:.0e}"


def _half(size: int, time_us: float) -> str:
    algbw = size / time_us / 1e3
    numbers = (_number(algbw, 6), _number(algbw * 1.75, 6))
    return f"  {_number(time_us, 7):>7}  {numbers[0]:>6}  {numbers[1]:>6}       0"


def write_output(path: Path, rows: int) -> None:
    """Write one output with `rows` rows."""
    ranks = "\n".join(_RANK.format(rank) for rank in range(8))
    with path.open("w", encoding="utf-8") as file:
        file.write(_HEADER.format(ranks=ranks, half=_HALF))
        for number in range(rows):
            size = 8 << number % 32
            time_us = (20.0 + size / 240e3) * (1.0 + number % 997 / 10_000)
            halves = _half(size, time_us) + _half(size, time_us * 1.01)
            file.write(f"{size:12}  {size // 4:12}     float     sum      -1{halves}\n")
        file.write("# Out of bounds values : 0 OK\n# Avg bus bandwidth    : 120.5\n#\n")


def main() -> None:
    """Generate, import, report."""
    rows = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "all_reduce.log"
        write_output(log, rows)
        done = subprocess.run(
            [sys.executable, "-c", _CHILD, str(log), str(Path(folder) / "data")],
            check=True,
            capture_output=True,
            text=True,
        )
    figures = json.loads(done.stdout)
    write_result("import", {**figures, "rows_per_s": figures["rows"] / figures["seconds"]})


if __name__ == "__main__":
    main()
