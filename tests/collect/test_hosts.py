"""Hosts and nodes of an output: where the ranks ran, and whether hosts are NCCL's nodes."""

import pytest

from dynamiccl.collect.facts import hosts_of
from dynamiccl.collect.nccl_log import host_list
from dynamiccl.collect.nccl_tests import TextOutput, parse_text
from dynamiccl.collect.output import rank_lines

ROW = (
    "1048576  262144  float  sum  -1  100.0  10.49  {busbw:.2f}  0  102.0  10.28  {in_place:.2f}  0"
)


def output(
    hosts: int,
    per_host: int,
    *,
    prefix: str = "",
    bus_id: str = "0x01",
    pid: int | None = None,
    extra: str = "",
) -> TextOutput:
    """What ranks of GH200 nodes print: each sees one GPU, device 0, on bus 1 of its domain."""
    ranks = hosts * per_host
    factor = 2 * (ranks - 1) / ranks
    lines = [extra, "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1048576", "# Using devices"]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid {pid or 1000 + rank:6d} on nid{rank // per_host:06d} "
        f"device  0 [{bus_id}] NVIDIA GH200 120GB"
        for rank in range(ranks)
    ]
    lines.append(ROW.format(busbw=10.49 * factor, in_place=10.28 * factor))
    lines.append("# Avg bus bandwidth    : 1")
    return parse_text(
        "\n".join(
            f"{prefix}{line}" for line in ["# Collective test starting: all_reduce_perf", *lines]
        ),
        where="gh200.log",
    )


@pytest.mark.parametrize("hosts", [1, 16, 512])
@pytest.mark.parametrize("prefix", ["", "0: "])
def test_ranks_that_see_one_gpu_each_are_not_one_gpu(hosts: int, prefix: str) -> None:
    found = output(hosts, 4, prefix=prefix)
    [shape] = {(r["num_ranks"], r["num_nodes"], r["ranks_per_node"]) for r in found.rows}
    assert shape == (4 * hosts, hosts, 4)
    assert any("taken for GPUs apart" in remark for remark in found.remarks)


def test_gpus_with_bus_ids_of_their_own_need_no_remark() -> None:
    lines = output(2, 1, bus_id="0009:01:00")
    assert lines.rows[0]["num_nodes"] == 2
    assert not any("GPU" in remark for remark in lines.remarks)


@pytest.mark.parametrize(
    "how",
    [
        {"extra": "NCCL_HOSTID=$RANK mpirun -n 8 all_reduce_perf"},
        {"pid": 77},  # threads of one process see all GPUs: device 0 twice is one GPU
        {"per_host": 32},  # no host has so many GPUs
        {"bus_id": "0000:02:00"},  # with the PCI domain: one GPU, as in tests of a single card
    ],
    ids=["host ids", "one process", "too many", "whole bus ids"],
)
def test_ranks_that_share_a_gpu_leave_the_number_of_nodes_open(how: dict[str, object]) -> None:
    found = output(**{"hosts": 2, "per_host": 4, **how})  # type: ignore[arg-type]
    assert found.rows
    assert all(row.get("num_nodes") is None for row in found.rows)
    assert any("ranks share a GPU" in remark for remark in found.remarks)


def test_hosts_are_listed_in_the_order_of_ranks() -> None:
    assert {row["hosts"] for row in output(3, 4).rows} == {"nid[000000-000002]"}
    backwards = [
        f"#  Rank {r} Group 0 Pid 1 on {h} device 0 [0x01] X" for r, h in ((1, "a"), (0, "b"))
    ]
    assert hosts_of(rank_lines(backwards)) == "b,a"
    assert hosts_of(rank_lines(["nothing of the kind"])) is None


@pytest.mark.parametrize(
    ("hosts", "text"),
    [
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n9", "n10"], "n9,n10"),
        (["n09", "n10", "n12"], "n[09-10],n12"),
        (["a1.x", "a2.x", "a3.y"], "a[1-2].x,a3.y"),
        (["login", "login"], "login"),
        (["b2", "b1"], "b2,b1"),
        ([], ""),
    ],
)
def test_runs_of_numbers_are_a_range(hosts: list[str], text: str) -> None:
    assert host_list(hosts) == text
