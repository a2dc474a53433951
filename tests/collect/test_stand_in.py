"""The stand-in for nccl-tests: its lines against a real log."""

import re
from pathlib import Path

from tests.fakes.nccl_tests.install import run_stand_in
from tests.published import folder


def shape_of(text: str) -> list[str]:
    """The layout of a text: figures, and what names a device or a release, replaced."""
    text = re.sub(r"Pid +\d+ on +\S+ device +\d+ \[[^]]*\] .*", "DEVICE", text)
    text = re.sub(r"version \S+", "RELEASE", text)
    text = re.sub(r"Avg bus bandwidth    : \S+", "BANDWIDTH", text)
    return re.sub(r"\d", "9", text).rstrip().splitlines()


def test_lines_are_those_of_a_real_run(tmp_path: Path) -> None:
    """Two GH200, one process each, NCCL 2.30.7: the same command line, digit for digit.

    Its nccl-tests is 2.18.2, the newest of the logs that are whole; `src/util.cu` of 2.19.6 writes
    these lines by the same formats.
    """
    real = (folder("logs") / "cscs_gh200_2ranks_v2.18.2.log").read_text(encoding="utf-8")
    two = {"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "1"}
    text = run_stand_in(tmp_path, "all_reduce_perf", "-b", "1M", "-e", "128M", "-f2", **two)
    ours, theirs = shape_of(text), shape_of(real)[1:]
    assert len(ours) == len(theirs)
    for mine, line in zip(ours, theirs, strict=True):
        if mine.lstrip()[:1] != "9":
            assert mine == line
        # Columns are right-aligned: each ends where the real one ends.
        ends = [[m.end() for m in re.finditer(r"\S+", one)] for one in (mine, line)]
        assert ends[0] == ends[1]
