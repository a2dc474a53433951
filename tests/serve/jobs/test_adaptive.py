"""Adaptive mode in whole jobs: the leader's brain moves the table, and may die, hang or lie."""

import socket
import subprocess
import threading
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME
from tests.serve.jobs.conftest import Player, player_of
from tests.serve.jobs.play import Played, at
from tests.serve.jobs.setting import Setting
from tests.serve.jobs.thinking import adaptive, brain, socket_of
from tests.serve.jobs.watching import Look

LOOPS: Final = {"ranks": 8, "rate": 700, "calls": 3200}


def assert_in_force_to_the_end(played: Played) -> None:
    assert played.is_sound, str(played)
    (comm,) = played.communicators
    assert comm.acted > 0
    assert comm.last_acted == comm.calls - 1


def test_a_brain_moves_the_table_on_all_ranks_at_one_call(
    play_job: Player, eight_ranks: Setting, known: Path
) -> None:
    with brain(eight_ranks, known, "once"):
        played = play_job(environment=adaptive(eight_ranks), **LOOPS)
    assert_in_force_to_the_end(played)
    assert played.switches == 2  # to the artifact's table, and to the brain's
    assert "results are not bitwise the same" in played.log


def test_a_brain_may_change_its_mind(play_job: Player, eight_ranks: Setting, known: Path) -> None:
    with brain(eight_ranks, known, "restless"):
        played = play_job(environment=adaptive(eight_ranks), **LOOPS)
    assert_in_force_to_the_end(played)
    assert played.switches >= 3


def test_a_brain_can_tell_new_calls_from_those_that_it_has_seen(
    play_job: Player, eight_ranks: Setting, known: Path
) -> None:
    often = {"DYNAMICCL_ADAPT_INTERVAL_S": "0.02", "DYNAMICCL_LOOK_INTERVAL_S": "0.02"}
    with brain(eight_ranks, known, "counting"):
        played = play_job(environment=adaptive(eight_ranks, **often), **LOOPS)
    assert_in_force_to_the_end(played)
    assert played.switches == 2
    assert "the brain gave no table" not in played.log


def test_a_brain_is_left_with_its_communicator(
    play_job: Player, eight_ranks: Setting, known: Path
) -> None:
    late = eight_ranks.root / "late"
    with brain(eight_ranks, known, "restless") as process:
        count = f"ls -l /proc/{process.pid}/fd | grep -c socket:"
        idle = int(subprocess.check_output(count, shell=True))
        played = play_job(
            *at(4100, f"sh={count} > {late}"),
            environment=adaptive(eight_ranks),
            ranks=8,
            rate=700,
            lifetime=1400,
            calls=4200,
            deadline=90,
        )
    assert played.is_sound, str(played)
    (comm,) = played.communicators
    assert comm.generations == 3
    assert comm.generations_acted >= 2
    assert int(late.read_text()) <= idle + 1  # not one for each generation


@pytest.mark.parametrize("signal", ["KILL", "STOP"])
def test_a_brain_that_goes_leaves_the_table_in_force(
    signal: str, play_job: Player, eight_ranks: Setting, known: Path
) -> None:
    with brain(eight_ranks, known, "restless") as process:
        played = play_job(
            *at(2000, f"sh=kill -{signal} {process.pid}"),
            environment=adaptive(eight_ranks),
            **LOOPS,
        )
    assert_in_force_to_the_end(played)
    if signal != "STOP":
        assert "the brain gave no table, the one in force stays: brain at" in played.log


@pytest.mark.parametrize("policy", ["elsewhere", "fails"])
def test_a_brain_that_is_wrong_leaves_the_table_in_force(
    policy: str, play_job: Player, eight_ranks: Setting, known: Path
) -> None:
    with brain(eight_ranks, known, policy):
        played = play_job(environment=adaptive(eight_ranks), **LOOPS)
    assert_in_force_to_the_end(played)
    assert played.switches == 1
    reasons = {"elsewhere": "its table is for another communicator", "fails": "ZeroDivisionError"}
    assert f": {reasons[policy]}" in played.log
    assert played.log.count("the brain gave no table") == 1


@pytest.mark.parametrize("answer", [b"", b"\x08\0\0\0nonsense"])
def test_who_talks_nonsense_is_no_brain(
    answer: bytes, play_job: Player, eight_ranks: Setting
) -> None:
    path = socket_of(eight_ranks)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        path.chmod(0o600)
        listener.listen()
        threading.Thread(target=talk, args=(listener, answer), daemon=True).start()
        played = play_job(environment=adaptive(eight_ranks), **LOOPS)
        listener.shutdown(socket.SHUT_RDWR)
    assert_in_force_to_the_end(played)
    assert played.switches == 1
    assert played.log.count("the brain gave no table") == 1


def talk(listener: socket.socket, answer: bytes) -> None:
    """Say the same to everybody, and hang up."""
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        with connection:
            try:
                connection.recv(100)
                connection.sendall(answer)
            except OSError:
                continue


def test_without_a_brain_the_table_stays(play_job: Player, eight_ranks: Setting) -> None:
    played = play_job(environment=adaptive(eight_ranks), **LOOPS)
    assert_in_force_to_the_end(played)
    assert played.switches == 1
    assert "there is no such file" in played.log


@pytest.mark.parametrize("where", ["process", "job"])
def test_the_artifacts_policy_decides_in_a_process_and_in_the_job(
    where: str,
    eight_ranks: Setting,
    known: Path,
    torch_build_dir: Path,
) -> None:
    """TorchScript in the job: in the leader's process and in no other."""
    play = player_of(torch_build_dir, ADAPTIVE_NAME)
    look = Look(eight_ranks.root / "look")
    chosen = adaptive(eight_ranks, DYNAMICCL_ARTIFACT=str(known), DYNAMICCL_SYSTEM="box")
    if where == "job":
        del chosen["DYNAMICCL_BRAIN_SOCKET"]
        played = play(*at(LOOPS["calls"] - 300, look.action), environment=chosen, **LOOPS)
    else:
        with brain(eight_ranks, known, "artifact"):
            played = play(*at(LOOPS["calls"] - 300, look.action), environment=chosen, **LOOPS)
    assert played.is_sound, str(played)
    assert played.acted > 0
    assert played.switches >= 2
    assert "the brain gave no table" not in played.log
    loaded = [any("libtorch" in path for path in rank.libraries) for rank in look.ranks()]
    assert loaded == [where == "job"] + [False] * 7
