"""How the ranks of a job come to use one table from one call on, or none of them any."""

import re
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Final

import pytest

from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import DEADLINE_S, Played, at, every, on_rank
from tests.serve.jobs.setting import JOB, Setting, make_setting, write_machine

#: Releases that tell all that an agreement during a job takes.
IDENTIFIED: Final = ("2.28", "2.29", "2.30")
STRANGE_GPU: Final = "NVIDIA Strange GPU"


def slots_acted(played: Played) -> set[int]:
    return {comm.slot for comm in played.communicators if comm.acted}


def begins_by_abstaining(played: Played) -> bool:
    firsts = [comm.first_acted for comm in played.communicators if comm.acted]
    return bool(firsts) and all(first is not None and first > 0 for first in firsts)


@pytest.mark.parametrize("release", IDENTIFIED)
def test_all_ranks_begin_at_one_call(release: str, play_job: Player, four_ranks: Setting) -> None:
    played = play_job(
        environment=four_ranks.environment(), ranks=4, comms=4, threads=2, release=release, **JOB
    )
    assert played.is_sound, played
    assert slots_acted(played) == {0, 1, 2, 3}, played.log
    assert begins_by_abstaining(played)
    assert all(comm.last_acted == comm.calls - 1 for comm in played.communicators)


@pytest.mark.parametrize("release", ["2.21", "2.26", "2.27"])
def test_before_2_28_all_abstain(release: str, play_job: Player, four_ranks: Setting) -> None:
    played = play_job(environment=four_ranks.environment(), ranks=4, release=release, calls=500)
    assert (played.is_sound, played.acted) == (True, 0), played
    assert "mode adaptive needs NCCL 2.28 or later" in played.log


def test_ranks_of_several_nodes_agree_through_the_coordinator(
    play_job: Player, two_nodes: Setting
) -> None:
    played = play_job(
        environment=two_nodes.environment(coordinator=True), ranks=8, nodes=2, comms=4, **JOB
    )
    assert played.is_sound, played
    assert slots_acted(played) == {0, 1, 2, 3}, played.log
    assert begins_by_abstaining(played)


def test_several_nodes_without_a_coordinator_abstain(play_job: Player, two_nodes: Setting) -> None:
    played = play_job(environment=two_nodes.environment(), ranks=8, nodes=2, **JOB)
    assert played.is_sound, played
    assert played.acted == 0


Difference = Callable[[Setting], list[str]]
DIFFERENCES: Final[dict[str, Difference]] = {
    "artifact": lambda s: on_rank(2, {"DYNAMICCL_ARTIFACT": str(s.other_artifact)}),
    "no-artifact": lambda _: on_rank(2, {"DYNAMICCL_ARTIFACT": None}),
    "machine": lambda s: on_rank(2, {"DYNAMICCL_TEST_ROOT": str(_strange_machine(s))}),
    "disabled": lambda _: on_rank(2, {"DYNAMICCL_DISABLE": "1"}),
    "plugin": lambda _: ["--without-plugin", "2"],
    "job": lambda _: on_rank(2, {"DYNAMICCL_JOB_ID": "another"}),
    "restart": lambda _: on_rank(2, {"DYNAMICCL_RESTART": "7"}),
}


def _strange_machine(setting: Setting) -> Path:
    return write_machine(setting.root / "strange", gpu=STRANGE_GPU)


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("coordinator", [False, True], ids=["local", "coordinator"])
def test_one_rank_that_differs_makes_all_abstain(
    difference: str, coordinator: bool, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *DIFFERENCES[difference](four_ranks),
        environment=four_ranks.environment(coordinator=coordinator),
        ranks=4,
        comms=2,
        **JOB,
    )
    assert played.is_sound, played
    # The tensor group of ranks 0 and 1 does not have the odd one.
    odd = [comm for comm in played.communicators if 2 in comm.ranks]
    assert [comm.acted for comm in odd] == [0, 0]
    assert all(comm.acted for comm in played.communicators if 2 not in comm.ranks)


@pytest.mark.parametrize("difference", ["artifact", "machine"])
def test_a_line_says_which_rank_differs(
    difference: str, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *DIFFERENCES[difference](four_ranks), environment=four_ranks.environment(), ranks=4, **JOB
    )
    assert re.search(r"\brank 2\b", played.log), played.log
    assert re.search(difference, played.log), played.log


def test_a_machine_that_the_artifact_does_not_know_abstains(
    play_job: Player, four_ranks: Setting
) -> None:
    strange = {"DYNAMICCL_TEST_ROOT": str(_strange_machine(four_ranks))}
    played = play_job(environment=four_ranks.environment() | strange, ranks=4, **JOB)
    assert played.is_sound, played
    assert played.acted == 0
    assert STRANGE_GPU in played.log


def test_a_system_that_is_not_this_machine_abstains(play_job: Player, four_ranks: Setting) -> None:
    named = four_ranks.environment() | {"DYNAMICCL_SYSTEM": "another-system"}
    played = play_job(environment=named, ranks=4, **JOB)
    assert (played.is_sound, played.acted) == (True, 0), played


def test_disabled_touches_nothing(play_job: Player, four_ranks: Setting) -> None:
    off = four_ranks.environment() | {"DYNAMICCL_DISABLE": "1"}
    played = play_job(environment=off, ranks=4, **JOB)
    assert (played.is_sound, played.acted) == (True, 0), played


def test_creation_waits_for_nobody(play_job: Player, four_ranks: Setting) -> None:
    # A creation that waited for the rank without a plugin would outlast the job's deadline.
    limit_s = 2 * DEADLINE_S
    environment = four_ranks.environment(coordinator=True)
    played = play_job(
        "--without-plugin",
        "3",
        environment=environment | {"DYNAMICCL_DECISION_LIMIT_S": str(limit_s)},
        ranks=4,
        comms=8,
        lifetime=100,
    )
    assert played.is_sound, played


@pytest.mark.parametrize("mode", [0o644, 0o660])
def test_a_key_that_others_can_read_is_no_key(
    mode: int, play_job: Player, four_ranks: Setting
) -> None:
    four_ranks.key.chmod(mode)
    played = play_job(environment=four_ranks.environment(coordinator=True), ranks=4, **JOB)
    assert (played.is_sound, played.acted) == (True, 0), played


def test_a_port_that_is_taken_makes_all_abstain(play_job: Player, four_ranks: Setting) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        taken = {"DYNAMICCL_COORDINATOR": f"127.0.0.1:{port}"}
        played = play_job(environment=four_ranks.environment() | taken, ranks=4, **JOB)
    assert (played.is_sound, played.acted) == (True, 0), played


@contextmanager
def strangers(port: int) -> Iterator[list[int]]:
    """Somebody who keeps connecting to the port and talks nonsense, or nothing; counts them."""
    stop = threading.Event()
    connected = [0]

    def bother() -> None:
        kept: list[socket.socket] = []
        while not stop.wait(0.01):
            try:
                kept.append(socket.create_connection(("127.0.0.1", port), timeout=1))
                if len(kept) % 2:
                    kept[-1].sendall(bytes(range(256)) * 64)
                connected[0] += 1
            except OSError:
                continue  # nobody listens yet, or no longer
        for one in kept:
            one.close()

    thread = threading.Thread(target=bother)
    thread.start()
    try:
        yield connected
    finally:
        stop.set()
        thread.join()


def test_questions_about_symmetric_kernels_are_no_calls(
    play_job: Player, four_ranks: Setting
) -> None:
    """One rank asks them, so ranks that counted them would never be at one call."""
    played = play_job(
        *every(50, "symmetric=4", rank=1), environment=four_ranks.environment(), ranks=4, **JOB
    )
    assert played.is_sound, played
    assert begins_by_abstaining(played), played.log


@pytest.mark.parametrize("seed", range(3, 7))
def test_what_comes_of_two_disjoint_shrinks_abstains(
    seed: int, play_job: Player, four_ranks: Setting
) -> None:
    """Both halves shrink the world at once, under one id, and split that, under one id again."""
    played = play_job(
        environment=four_ranks.environment(),
        release="2.30",
        ranks=4,
        comms=4,
        shrinks=1,
        seed=seed,
        **JOB,
    )
    assert played.is_sound, played
    assert slots_acted(played) == {0}, played.log
    assert "a communicator was shrunk before" in played.log


def test_a_release_that_nobody_has_read_abstains(play_job: Player, four_ranks: Setting) -> None:
    played = play_job(environment=four_ranks.environment(), ranks=4, release="2.31", **JOB)
    assert (played.is_sound, played.acted) == (True, 0), played
    assert "another release of NCCL than 2.27 to 2.30" in played.log


def test_nccl_comm_id_gives_all_communicators_one_id(play_job: Player, four_ranks: Setting) -> None:
    environment = four_ranks.environment() | {"NCCL_COMM_ID": "127.0.0.1:1"}
    played = play_job(environment=environment, ranks=4, **JOB)
    assert (played.is_sound, played.acted) == (True, 0), played
    assert "NCCL_COMM_ID is set" in played.log


def test_agents_of_torchrun_count_restarts_each_for_itself(
    play_job: Player, two_nodes: Setting
) -> None:
    """Only the agent whose process failed counts one (torch 2.13 elastic `agent/server/api.py`)."""
    restarted = [on_rank(rank, {"TORCHELASTIC_RESTART_COUNT": str(rank // 4)}) for rank in range(8)]
    played = play_job(
        *chain.from_iterable(restarted),
        environment=two_nodes.environment(coordinator=True),
        ranks=8,
        nodes=2,
        **JOB,
    )
    assert played.is_sound, played
    assert begins_by_abstaining(played), played.log


def test_strangers_on_the_port_stall_nothing(play_job: Player, four_ranks: Setting) -> None:
    environment = four_ranks.environment(coordinator=True)
    port = int(environment["DYNAMICCL_COORDINATOR"].rpartition(":")[2])
    with strangers(port) as connected:
        played = play_job(environment=environment, ranks=4, comms=2, **JOB)
    assert played.is_sound, played
    assert slots_acted(played) == {0, 1}, played.log
    assert connected[0] > 10


@pytest.mark.parametrize("what", ["job", "restart"])
def test_two_jobs_on_one_node_do_not_meet(what: str, play_job: Player, four_ranks: Setting) -> None:
    first = four_ranks.environment()
    second = first | {"DYNAMICCL_ARTIFACT": str(four_ranks.other_artifact)}
    second |= {"DYNAMICCL_JOB_ID": "x"} if what == "job" else {"DYNAMICCL_RESTART": "1"}
    with ThreadPoolExecutor() as pool:
        jobs = list(
            pool.map(lambda chosen: play_job(environment=chosen, ranks=4, **JOB), [first, second])
        )
    for played in jobs:
        assert played.is_sound, played
        assert begins_by_abstaining(played)


def test_communicators_come_and_go_while_they_agree(play_job: Player, four_ranks: Setting) -> None:
    for lifetime in (1, 1500):
        played = play_job(
            environment=four_ranks.environment(),
            ranks=4,
            comms=6,
            threads=3,
            lifetime=lifetime,
            rate=3000,
            calls=3000 if lifetime > 1 else 100,
        )
        assert played.is_sound, played
        if lifetime == 1500:
            assert all(comm.generations_acted for comm in played.communicators)


@pytest.mark.parametrize("release", ["2.28", "2.30"])
def test_communicators_of_one_group_are_told_apart(
    release: str, play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        environment=four_ranks.environment(),
        ranks=4,
        comms=9,
        release=release,
        create_at_once=1,
        rate=1000,
        calls=2000,
    )
    assert played.is_sound, played
    assert slots_acted(played) == set(range(9))
    assert begins_by_abstaining(played)


def test_sixteen_ranks_and_many_communicators(play_job: Player, tmp_path: Path) -> None:
    setting = make_setting(tmp_path, num_ranks=16)
    played = play_job(
        environment=setting.environment(), ranks=16, comms=8, threads=2, rate=300, calls=900
    )
    assert played.is_sound, played
    assert slots_acted(played) == set(range(8))


@pytest.mark.soak
def test_sixty_four_communicators(play_job: Player, four_ranks: Setting) -> None:
    played = play_job(
        environment=four_ranks.environment(), ranks=4, comms=64, threads=4, rate=200, calls=1000
    )
    assert played.is_sound, played
    assert slots_acted(played) == set(range(64))


def test_a_rank_that_comes_late_is_waited_for_by_nobody(
    play_job: Player, four_ranks: Setting
) -> None:
    played = play_job(
        *at(0, "sleep=3", rank=3), environment=four_ranks.environment(), ranks=4, **JOB
    )
    assert played.is_sound, played
    assert played.acted > 0
    assert played.asked_longest_ms < 3000  # what it slept
