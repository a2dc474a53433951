"""Several communicators at once: what a split makes of a job, and what a sweep file may say."""

import pytest

from dynamiccl.collect.grid import Split
from dynamiccl.collect.schedule import trial_row
from dynamiccl.collect.sweep import parse_sweep, sweep_text
from dynamiccl.errors import InvalidSweep
from tests.collect.benchmark.sweeps import launch_of, sweep


@pytest.mark.parametrize(
    ("text", "shape", "second"),
    [
        ("MOD 8", (4, 1), (1, 9, 17, 25)),
        ("AND 0x7", (4, 1), (1, 9, 17, 25)),
        ("DIV 8", (1, 8), tuple(range(8, 16))),
        ("| 0b111", (1, 8), tuple(range(8, 16))),
        ("MOD 2", (4, 4), (*range(1, 32, 2),)),
        ("AND 0x17", (2, 1), (1, 9)),
    ],
)
def test_split_makes_communicators_of_one_shape(
    text: str, shape: tuple[int, int], second: tuple[int, ...]
) -> None:
    comms = Split.parse(text).comms(4, 8)
    assert (comms.num_nodes, comms.ranks_per_node) == shape
    assert comms.members[1] == second
    assert sorted(process for each in comms.members for process in each) == [*range(32)]


@pytest.mark.parametrize("text", ["XOR 3", "MOD", "MOD 0", "DIV 08", "MOD 8 8", "8", ""])
def test_what_nccl_tests_would_not_split_by_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"is no split|divides by 0"):
        Split.parse(text)


def test_communicators_of_several_shapes_are_refused_and_said() -> None:
    with pytest.raises(ValueError, match=r"'MOD 7' makes no equal .*'DIV 8'"):
        Split.parse("MOD 7").comms(4, 8)


def test_single_processes_may_be_left_over_where_that_is_said() -> None:
    pairs = Split.parse("AND 0x17")
    with pytest.raises(ValueError, match="no equal communicators"):
        pairs.comms(3, 8)
    assert pairs.comms(3, 8, spare=True).members == tuple((k, k + 8) for k in range(8))


def test_group_of_a_split_is_the_communicator_and_its_launch_the_job() -> None:
    made = sweep(groups='[{ num_nodes = 4, ranks_per_node = 8, split = "%8" }]')
    setting = made.trials[0].setting
    assert (setting.num_nodes, setting.ranks_per_node, setting.num_ranks) == (4, 1, 4)
    assert (setting.hosts, setting.ranks_per_host) == (4, 8)
    row = trial_row(made.file, launch_of([made.trials[0]]), made.trials[0])
    assert (row["num_ranks"], row["num_comms"], row["comm_split"]) == (4, 8, "MOD 8")


def test_lone_and_split_groups_of_one_shape_are_other_settings() -> None:
    groups = (
        "[{ num_nodes = 1, ranks_per_node = 8 },"
        '{ num_nodes = 2, ranks_per_node = 8, split = "DIV 8" },'
        '{ num_nodes = 4, ranks_per_node = 8, split = "DIV 8" }]'
    )
    made = sweep(groups=groups)
    settings = {trial.setting for trial in made.trials}
    assert {(one.num_nodes, one.ranks_per_node) for one in settings} == {(1, 8)}
    assert len({one.key for one in settings}) == 3
    assert len({trial.key for trial in made.trials}) == len(made.trials)


def test_a_split_survives_being_written_down() -> None:
    made = sweep(groups='[{ num_nodes = 3, ranks_per_node = 8, split = "&23", spare = true }]')
    assert parse_sweep(sweep_text(made.file), where="again").trials == made.trials


@pytest.mark.parametrize(
    ("group", "said"),
    [
        ('num_nodes = 4, ranks_per_node = 8, split = "MOD 7"', "no equal communicators"),
        ('num_nodes = 4, ranks_per_node = 8, split = "MOD 1"', "one communicator"),
        ('num_nodes = 4, ranks_per_node = 8, split = "DIV 1"', "alone"),
        (
            'num_nodes = 1, ranks_per_node = 8, num_hosts = 2, split = "DIV 2"',
            "nodes that are hosts",
        ),
        ("num_nodes = 4, ranks_per_node = 8, spare = true", "give one"),
    ],
)
def test_group_that_cannot_be_split_is_refused(group: str, said: str) -> None:
    with pytest.raises(InvalidSweep, match=said):
        sweep(groups=f"[{{ {group} }}]")
