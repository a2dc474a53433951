"""The stand-in's communicators: who is in which, what is printed of them, and who is slow."""

import json
from pathlib import Path

import pytest

from dynamiccl.nccl import NcclVersion
from tests.fakes.nccl_tests.groups import colours, group_world, slowdowns
from tests.fakes.nccl_tests.install import install_stand_in
from tests.fakes.nccl_tests.world import World
from tests.fakes.running import StandIn

NEW = NcclVersion(2, 19, 6)
WORLD = World(rank=5, size=8, local_rank=1, hosts=("a",) * 4 + ("b",) * 4)
FIRST = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
}


@pytest.mark.parametrize(
    ("variables", "found"),
    [
        ({}, [0] * 8),
        ({"NCCL_TESTS_SPLIT": "MOD 4"}, [0, 1, 2, 3, 0, 1, 2, 3]),
        ({"NCCL_TESTS_SPLIT": "div4"}, [0, 0, 0, 0, 1, 1, 1, 1]),
        ({"NCCL_TESTS_SPLIT": "&0x3"}, [0, 1, 2, 3, 0, 1, 2, 3]),
        ({"NCCL_TESTS_SPLIT": "OR 0b11"}, [3, 3, 3, 3, 7, 7, 7, 7]),
        ({"NCCL_TESTS_SPLIT": "XOR 3"}, [0] * 8),
        # The mask wins, and is hexadecimal without saying so.
        ({"NCCL_TESTS_SPLIT": "MOD 4", "NCCL_TESTS_SPLIT_MASK": "4"}, [0] * 4 + [4] * 4),
    ],
)
def test_colours_are_nccl_tests_own(variables: dict[str, str], found: list[int]) -> None:
    assert colours(WORLD, variables, NEW) == found


def test_releases_before_2_14_know_the_mask_alone() -> None:
    old = NcclVersion(2, 13, 12)
    assert colours(WORLD, {"NCCL_TESTS_SPLIT": "MOD 4"}, old) == [0] * 8
    assert colours(WORLD, {"NCCL_TESTS_SPLIT_MASK": "0x3"}, old) == [0, 1, 2, 3] * 2


def test_communicator_has_the_processes_of_its_colour() -> None:
    mine = group_world(WORLD, colours(WORLD, {"NCCL_TESTS_SPLIT": "MOD 4"}, NEW))
    assert (mine.rank, mine.size, mine.hosts, mine.num_nodes) == (1, 2, ("a", "b"), 2)


def test_slow_process_slows_its_communicator_alone() -> None:
    pairs = colours(WORLD, {"NCCL_TESTS_SPLIT": "MOD 4"}, NEW)
    slow = slowdowns(WORLD, pairs, {"FAKE_SLOW": "5:1.5"})
    assert slow == [1.0, 1.5, 1.0, 1.0, 1.0, 1.5, 1.0, 1.0]


def test_one_table_is_printed_with_the_mean_over_all_communicators(tmp_path: Path) -> None:
    stand_in = StandIn(install_stand_in(tmp_path / "bin"))
    path = tmp_path / "rows.json"
    variables = {**FIRST, "NCCL_TESTS_SPLIT": "MOD 4", "FAKE_NOISE": "0"}
    words = ("-b", "64M", "-e", "64M", "-c", "0", "-I", "1", "-J", str(path))
    stand_in.output("all_reduce_perf", *words, settings={**variables, "FAKE_SLOW": "1:2"})
    content = json.loads(path.read_text())
    assert [device["group"] for device in content["config"]["devices"]] == [0, 1, 2, 3] * 2
    [row] = content["results"]
    half = row["out_of_place"]
    processes = row["out_of_place_per_iter"]["per_process_max_times_us"]
    means = [sum(times) / len(times) for times in processes]
    assert means[1] == pytest.approx(2 * means[0], rel=0.01)
    assert half["time"] == pytest.approx(sum(means) / 8, rel=0.05)
    # Of two ranks, and not of eight: busbw is algbw.
    assert half["bus_bw"] == pytest.approx(half["alg_bw"])
