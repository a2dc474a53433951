"""Split launches: their environment, who made which communicators, and what ran in each."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.benchmark.blocks import Verdict
from dynamiccl.collect.benchmark.command import Places, environment
from dynamiccl.collect.benchmark.launching import Site, Starter
from dynamiccl.collect.benchmark.read_back import agreed_choices, comm_logs
from dynamiccl.collect.benchmark.verdicts import of_members, wrong_comms
from dynamiccl.collect.launchers import LauncherSettings
from dynamiccl.collect.runner import LaunchMode
from dynamiccl.collect.sweep.trial import Setting
from dynamiccl.datasets.schema import Status
from dynamiccl.errors import InvalidSweep
from tests.collect.benchmark.sweeps import launch_of, sweep
from tests.collect.benchmark.test_read_back import CALLS, EVERY, GRID, RANKS, walk
from tests.fakes.nccl_tests.install import install_stand_in
from tests.fakes.running import StandIn

PAIRS = '[{ num_nodes = 2, ranks_per_node = 4, split = "MOD 4" }]'
LONE = "[{ num_nodes = 2, ranks_per_node = 4 }]"
PLACES = Places.under(Path("work"))
#: Rank 0 of two nodes of four, as Open MPI tells it.
FIRST = {
    "OMPI_COMM_WORLD_RANK": "0",
    "OMPI_COMM_WORLD_SIZE": "8",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "0",
}


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(install_stand_in(tmp_path_factory.mktemp("nccl-tests")))


def setting_of(groups: str) -> Setting:
    return sweep(groups=groups).trials[0].setting


def printed(stand_in: StandIn, settings: Mapping[str, str]) -> list[str]:
    return stand_in.output("all_reduce_perf", settings={**FIRST, **settings}).splitlines()


@pytest.mark.parametrize("mode", [LaunchMode.REFERENCE, LaunchMode.FORCED, LaunchMode.READ_BACK])
def test_split_is_set_on_every_rank_and_its_mask_is_not(mode: LaunchMode) -> None:
    launch = replace(launch_of([sweep(groups=PAIRS).trials[0]], mode), is_scheduled=False)
    made = environment(launch, PLACES, "", "")
    assert made.set["NCCL_TESTS_SPLIT"] == "MOD 4"
    assert "NCCL_TESTS_SPLIT_MASK" in made.unset


def test_lone_launches_leave_the_split_to_the_user() -> None:
    made = environment(launch_of([sweep().trials[0]], LaunchMode.REFERENCE), PLACES, "", "")
    assert not made.set


def test_one_process_for_all_gpus_cannot_be_split(tmp_path: Path) -> None:
    made = sweep(groups=PAIRS)
    site = Site(tmp_path, tmp_path, None, None, LauncherSettings())
    with pytest.raises(InvalidSweep, match="shares out processes, and launcher 'local'"):
        Starter(made.file, site, None).check(made.trials[0].setting)


def test_communicators_that_were_asked_for_are_right(stand_in: StandIn) -> None:
    lines = printed(stand_in, {"NCCL_TESTS_SPLIT": "MOD 4"})
    assert wrong_comms(setting_of(PAIRS), lines) is None
    assert wrong_comms(setting_of(LONE), printed(stand_in, {})) is None


@pytest.mark.parametrize(
    ("groups", "settings", "said"),
    [
        (PAIRS, {"NCCL_TESTS_SPLIT": "MOD 2"}, "groups of 4 ranks"),
        (PAIRS, {"NCCL_TESTS_SPLIT": "DIV 2"}, "groups of 2 ranks"),
        # What it was before 2.14, and without MPI, where each process is alone.
        (PAIRS, {"NCCL_TESTS_SPLIT": "MOD 4", "FAKE_NCCL_TESTS_VERSION": "2.13.12"}, "of 8 ranks"),
        (PAIRS, {"NCCL_TESTS_SPLIT": "MOD 4", "FAKE_NO_MPI": "1"}, "built with MPI"),
        (LONE, {"NCCL_TESTS_SPLIT": "MOD 4"}, "remove NCCL_TESTS_SPLIT from the environment"),
        (LONE, {"NCCL_TESTS_SPLIT_MASK": "0x3"}, "4 communicators"),
    ],
)
def test_other_communicators_are_told(
    stand_in: StandIn, groups: str, settings: dict[str, str], said: str
) -> None:
    wrong = wrong_comms(setting_of(groups), printed(stand_in, settings))
    assert wrong is not None
    assert said in wrong


def test_ranks_dealt_round_the_nodes_are_told(stand_in: StandIn) -> None:
    lines = printed(stand_in, {"NCCL_TESTS_SPLIT": "MOD 4"})
    # All ranks on one host: a communicator of two nodes that has one.
    first = next(line for line in lines if "Rank  0" in line).split(" on ")[1].split()[0]
    away = [line.replace(f"{first}-n1", first) for line in lines]
    wrong = wrong_comms(setting_of(PAIRS), away)
    assert wrong is not None
    assert "node by node" in wrong


def test_times_of_processes_that_are_left_over_do_not_count() -> None:
    spare = '[{ num_nodes = 3, ranks_per_node = 1, split = "AND 0x2", spare = true }]'
    half: dict[str, Any] = {
        "time_us": 68.0,
        "algbw_gbytes_per_s": 10.0,
        "busbw_gbytes_per_s": 10.0,
        "process_times_us": [100.0, 100.0, 4.0],
    }
    fine = Verdict(Status.OK)
    assert of_members([[half]], setting_of(spare), [fine]) == [fine]
    assert half["time_us"] == 100.0
    assert half["busbw_gbytes_per_s"] == pytest.approx(6.8)
    [verdict] = of_members([[{"time_us": 68.0}]], setting_of(spare), [fine])
    assert verdict.status is Status.FAILED
    assert "2.19.2" in verdict.reason


def test_read_back_takes_what_all_communicators_ran(tmp_path: Path) -> None:
    def found() -> list[Any]:
        return agreed_choices(
            comm_logs(tmp_path), GRID, num_ranks=RANKS, warmup_calls=0, calls_per_block=CALLS
        )

    for name in ("n1.7", "n2.8"):
        (tmp_path / f"nccl.{name}.log").write_text("\n".join(walk()))
    (tmp_path / "nccl.n1.9.log").write_text("of a rank that logs no calls")
    assert len(comm_logs(tmp_path)) == 2
    assert found() == EVERY
    other = [*walk()[:-CALLS], *(line.replace("RING", "TREE") for line in walk()[-CALLS:])]
    (tmp_path / "nccl.n2.8.log").write_text("\n".join(other))
    assert found() == [*EVERY[:-1], None]
