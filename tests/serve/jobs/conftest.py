from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final, Protocol

import pytest

from dynamiccl.serve.build import PLUGIN_NAME
from tests.serve.jobs.play import Played, play
from tests.serve.jobs.setting import Setting, make_setting

#: Tests of what the plugin does not do yet: agree.
PENDING: Final = frozenset(
    {
        "test_a_bad_artifact_is_refused_and_the_old_one_stays",
        "test_a_held_call_goes_on_when_nobody_answers",
        "test_a_held_call_is_the_first_of_the_table",
        "test_a_key_that_others_can_read_is_no_key",
        "test_a_line_says_which_rank_differs",
        "test_a_machine_that_the_artifact_does_not_know_abstains",
        "test_a_new_artifact_is_taken_at_one_call",
        "test_a_port_that_is_taken_makes_all_abstain",
        "test_a_static_job_takes_no_new_artifact",
        "test_all_ranks_begin_at_one_call",
        "test_an_abort_wakes_who_waits",
        "test_before_2_27_the_world_alone_is_decided",
        "test_creation_waits_for_nobody",
        "test_disabled_touches_nothing",
        "test_four_hundred_thousand_calls_while_artifacts_change",
        "test_one_rank_that_differs_makes_all_abstain",
        "test_ranks_of_several_nodes_agree_through_the_coordinator",
        "test_several_nodes_without_a_coordinator_abstain",
        "test_static_mode_agrees_as_well",
        "test_strangers_on_the_port_stall_nothing",
        "test_ten_thousand_switches_under_load",
        "test_the_kill_file_returns_everything_to_nccl",
        "test_two_jobs_on_one_node_do_not_meet",
        "test_without_the_kill_file_the_table_comes_back",
    }
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here and item.name.partition("[")[0] in PENDING:
            item.add_marker(pytest.mark.xfail(strict=False, reason="agreement"))


class Player(Protocol):
    """Plays a job of one plugin."""

    def __call__(
        self, *options: str, environment: Mapping[str, str], **named: object
    ) -> Played: ...


def player_of(directory: Path, plugin: str) -> Player:
    def run(*options: str, environment: Mapping[str, str], **named: object) -> Played:
        program = directory / "play_job"
        return play(program, directory / plugin, *options, environment=environment, **named)

    return run


@pytest.fixture(scope="session")
def play_job(build_dir: Callable[[str], Path]) -> Player:
    """Jobs under our plugin as it is built."""
    return player_of(build_dir(""), PLUGIN_NAME)


@pytest.fixture(scope="session")
def play_wilful(build_dir: Callable[[str], Path]) -> Player:
    """Jobs under a plugin that does what WILFUL_* tells it (tests/job/wilful_plugin.cpp)."""
    return player_of(build_dir(""), "libwilful.so")


@pytest.fixture
def four_ranks(tmp_path: Path) -> Setting:
    return make_setting(tmp_path, num_ranks=4)


@pytest.fixture
def two_nodes(tmp_path: Path) -> Setting:
    """Eight ranks on two nodes."""
    return make_setting(tmp_path, num_ranks=8, num_nodes=2)
