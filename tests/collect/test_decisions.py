"""What NCCL ran for each size, from the log of a job without a benchmark."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from dynamiccl.collect.cli import app
from dynamiccl.collect.imports import ImportOptions, ImportSummary, import_files
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError

HEAD = "lab:1:1 [0] NCCL INFO "
GROUP = "comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0"
RING = "AllReduce: 1048576 Bytes -> Algo RING proto LL128 channel{Lo..Hi}={0..15}"
GATHER = "AllGather: 4096 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}"
OLD = "1024 Bytes -> Algo 1 proto 0 time 12.5"


def taken(folder: Path, *said: str, **options: str | int) -> ImportSummary:
    path = folder / "job.log"
    path.write_text("".join(f"{HEAD}{line}\n" for line in said), encoding="utf-8")
    known = ImportOptions(system="lab", **options)  # type: ignore[arg-type]
    return import_files([path], folder / "out", options=known)


def rows(folder: Path) -> list[tuple[object, ...]]:
    columns = ("collective", "algorithm", "protocol", "size_bytes", "num_channels")
    return store.read(folder / "out", "decisions").select(columns).rows()


def test_job_log_gives_what_ran_for_each_size(tmp_path: Path) -> None:
    summary = taken(tmp_path, GROUP, RING, RING, GATHER, gpu="H100")
    # Bytes of one rank in the log of an AllGather, of all in the table.
    assert sorted(rows(tmp_path), key=str) == [
        ("AllGather", "Ring", "LL", 16 * 4096, 4),
        ("AllReduce", "Ring", "LL128", 1 << 20, 16),
    ]
    facts = ("num_ranks", "num_nodes", "ranks_per_node", "gpu", "launch_profile")
    found = store.read(tmp_path / "out", "decisions").select(facts).unique().rows()
    assert found == [(16, 2, 8, "H100", "default")]
    assert summary.to_json()["files"][0]["decisions"] == 2


def test_size_that_ran_as_two_configs_is_left_out_and_said(tmp_path: Path) -> None:
    summary = taken(tmp_path, GROUP, RING, RING.replace("LL128", "Simple"), GATHER)
    assert [row[0] for row in rows(tmp_path)] == ["AllGather"]
    assert summary.written_text == "0 measurements, 1 of NCCL's decisions"
    said = summary.files[0].remarks[0]
    assert said.startswith("AllReduce: sizes for which")
    assert said.endswith("left out: 1")


def test_lines_that_name_no_collective_are_those_of_the_named_one(tmp_path: Path) -> None:
    taken(tmp_path, GROUP, OLD, collective="AllReduce")
    assert rows(tmp_path) == [("AllReduce", "Ring", "LL", 1024, None)]
    with pytest.raises(OutputError, match="no row of nccl-tests"):
        taken(tmp_path, GROUP, OLD)


def test_communicators_of_several_sizes_are_not_mixed(tmp_path: Path) -> None:
    smaller = GROUP.replace("16", "8").replace("nNodes 2", "nNodes 1")
    with pytest.raises(OutputError, match="no row of nccl-tests"):
        taken(tmp_path, GROUP, smaller, RING, num_ranks=16)


def test_describe_tells_of_a_store_of_decisions_alone(tmp_path: Path) -> None:
    taken(tmp_path, GROUP, RING, GATHER)
    done = CliRunner().invoke(app, ["describe", str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    assert "what NCCL ? ran on 2x8 (default), of 2 sizes of 2 collectives" in done.output
