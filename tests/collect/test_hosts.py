"""Hosts and nodes of an output: where the ranks ran, and whether hosts are NCCL's nodes."""

import pytest

from dynamiccl.collect.output import hosts_of, rank_lines
from dynamiccl.slurm import expand_hosts, host_list
from tests.collect.parsed import Parsed, parse

ROW = (
    "1048576  262144  float  sum  -1  100.0  10.49  {busbw:.2f}  0  102.0  10.28  {in_place:.2f}  0"
)


def output(hosts: int, per_host: int, bus_id: str) -> Parsed:
    """What ranks of GH200 nodes print: each sees one GPU, device 0."""
    ranks = hosts * per_host
    factor = 2 * (ranks - 1) / ranks
    lines = ["# Collective test starting: all_reduce_perf", "# Using devices"]
    lines += [
        f"#  Rank {rank:2d} Group  0 Pid {1000 + rank:6d} on nid{rank // per_host:06d} "
        f"device  0 [{bus_id}] NVIDIA GH200 120GB"
        for rank in range(ranks)
    ]
    lines.append(ROW.format(busbw=10.49 * factor, in_place=10.28 * factor))
    return parse("\n".join(lines))


def test_hosts_of_gpus_with_bus_ids_of_their_own_are_nodes() -> None:
    lines = output(2, 1, "0009:01:00")
    assert {(r["num_ranks"], r["num_nodes"], r["ranks_per_node"]) for r in lines.rows} == {
        (2, 2, 1)
    }
    assert not any("GPU" in remark for remark in lines.remarks)


@pytest.mark.parametrize("bus_id", ["0x01", "0000:02:00"])
def test_ranks_that_seem_to_share_a_gpu_leave_the_number_of_nodes_open(bus_id: str) -> None:
    found = output(2, 4, bus_id)
    assert found.rows
    assert all(row.get("num_nodes") is None for row in found.rows)
    assert any("ranks show the same GPU" in remark for remark in found.remarks)


def test_hosts_are_listed_in_the_order_of_ranks() -> None:
    assert {row["hosts"] for row in output(3, 4, "0x01").rows} == {"nid[000000-000002]"}
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
    assert expand_hosts(text) == list(dict.fromkeys(hosts))
