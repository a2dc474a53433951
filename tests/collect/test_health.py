"""What a check names in simulated clusters, and what it says that it cannot tell."""

import itertools

import polars as pl
import pytest

from dynamiccl.collect.health import Report, examine
from dynamiccl.errors import NotEnoughData
from tests.collect.clusters import rows
from tests.rows import default, frame


def check(nodes: int, *slow: str, gpus: int = 8, seed: int = 0) -> Report:
    """The report on a simulated cluster that was measured once."""
    return examine(rows(nodes, *slow, gpus=gpus, seed=seed), least=0.05)


def named(report: Report) -> list[tuple[str, str]]:
    """Kind and place of each finding."""
    return [(finding["kind"], finding["where"]) for finding in report["findings"]]


def test_slow_part_is_named_and_nothing_else() -> None:
    for nodes, slow, kind, where in (
        (2, "gpu:1:3:1.3", "gpu", "node1 GPU 3"),
        (2, "node:1:1.3", "node", "node1"),
        # Which end it is nobody can tell from one pair.
        (2, "nic:1:3:1.3", "link", "node0 - node1 GPU 3"),
        (3, "nic:0:3:1.3", "nic", "node0 GPU 3"),
        (3, "link:0:2:1.3", "link", "node0 - node2"),
        (4, "node:2:2", "node", "node2"),
        (4, "link:1:3:1.3", "link", "node1 - node3"),
        (16, "nic:11:7:1.1", "nic", "node11 GPU 7"),
    ):
        report = check(nodes, slow)
        assert (named(report), report["is_well"]) == ([(kind, where)], False)
        factor, slower = float(slow.rpartition(":")[2]), report["findings"][0]["slower"]
        assert 0.6 * (factor - 1) < (slower or 0.0) < 1.1 * (factor - 1)


def test_nothing_is_found_in_a_healthy_cluster() -> None:
    assert all(check(nodes, seed=1)["is_well"] for nodes in (1, 2, 8))
    slow = rows(8, "nic:3:1:1.3")
    assert not examine(slow, least=0.2)["is_well"]
    assert examine(slow, least=0.5)["is_well"]


def test_several_slow_parts_are_all_named() -> None:
    slow = ("gpu:1:2:1.4", "nic:5:6:1.3", "node:7:1.2")
    assert sorted(named(check(8, *slow))) == [
        ("gpu", "node1 GPU 2"),
        ("nic", "node5 GPU 6"),
        ("node", "node7"),
    ]
    # Hosts have their names.
    hosts = rows(4, "nic:2:1:1.5").with_columns(hosts=pl.lit("rack1-[08-09],login,n5"))
    assert named(examine(hosts, least=0.05)) == [("nic", "login GPU 1")]
    # A node of one GPU is no slower than its NIC.
    assert named(check(16, "node:3:1.2", gpus=1)) == [("nic", "node3 GPU 0")]


def test_a_second_launch_that_was_fast_clears_a_pair() -> None:
    one, other = rows(4, "link:0:1:1.5"), rows(4, seed=1)
    both = pl.concat([one, other.with_columns(sweep=pl.lit("again"))])
    assert not examine(one, least=0.05)["is_well"]
    assert examine(both, least=0.05)["is_well"]


def test_launch_that_hung_is_a_finding_and_not_well() -> None:
    hung = pl.col("comm_split") == "AND 0xf"
    lost = rows(4).with_columns(
        status=pl.when(hung).then(pl.lit("timed_out")).otherwise("status"),
        reason=pl.when(hung).then(pl.lit("no new row for 120 s")),
        hosts=pl.lit("n[1-4]"),
    )
    report = examine(lost, least=0.05)
    assert named(report) == [("failed", "n[1-4], split AND 0xf")]
    assert report["findings"][0]["note"] == "no new row for 120 s"
    none = lost.with_columns(process_times_us=pl.lit(None, dtype=pl.List(pl.Float64)))
    with pytest.raises(NotEnoughData, match="9 rows failed: no new row for 120 s"):
        examine(none, least=0.05)


def test_nic_whose_counters_rise_is_named() -> None:
    split = rows(4)
    lossy = split.with_columns(nic_retries=pl.lit(40), nic_worst=pl.lit("n3 mlx5_4/1"))
    report = examine(lossy, least=0.05)
    assert named(report) == [("counters", "n3 mlx5_4/1")]
    spread = split.with_columns(
        nic_retries=pl.lit(1), nic_worst=pl.format("n{}", pl.int_range(pl.len()) % 5)
    )
    assert examine(spread, least=0.05)["is_well"]
    twice = pl.when(pl.int_range(pl.len()) < 2).then(1)
    assert examine(lossy.with_columns(nic_retries=twice), least=0.05)["is_well"]


def pairs(*slow: str, nodes: str = "abcde", runs: int = 1) -> pl.DataFrame:
    """Logs of each two nodes, four sizes each: 50 us, and 90 us where both nodes' pair is slow."""
    noise = itertools.cycle((0.0, 0.1, -0.2, 0.15, -0.1, 0.05, 0.2))
    return frame(
        *(
            default(
                time_us=(90.0 if any(set(one) & set(pair) == set(one) for one in slow) else 50.0)
                + next(noise),
                run=f"{''.join(pair)}-{number}",
                hosts=",".join(pair),
                size_bytes=size << 20,
                num_nodes=2,
                num_ranks=2,
                ranks_per_node=1,
            )
            for pair in itertools.combinations(nodes, 2)
            for number in range(runs)
            for size in (1, 2, 4, 8)
        )
    )


def test_logs_of_pairs_name_the_slow_node_or_pair() -> None:
    report = examine(pairs("b"), least=0.05)
    assert named(report) == [("node", "b")]
    assert report["findings"][0]["slower"] == pytest.approx(0.8, abs=0.02)
    assert named(examine(pairs("bd"), least=0.05)) == [("link", "b - d")]
    assert sorted(named(examine(pairs("a", "de", runs=2), least=0.05))) == [
        ("link", "d - e"),
        ("node", "a"),
    ]
    assert examine(pairs(), least=0.05)["is_well"]


def test_a_call_on_two_sets_of_hosts_says_nothing_of_either() -> None:
    with pytest.raises(NotEnoughData, match="of pairs of four nodes or more"):
        examine(pairs("b", nodes="abc"), least=0.05)
    two = pairs("ab", nodes="abcd").filter(pl.col("hosts").is_in(["a,b", "c,d"]))
    with pytest.raises(NotEnoughData, match="3 sets of hosts or more"):
        examine(two, least=0.05)
    both = pl.concat([two.with_columns(sweep=pl.lit("two")), rows(4)])
    assert examine(both, least=0.05)["not_compared"] == 2
