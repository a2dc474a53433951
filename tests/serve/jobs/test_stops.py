"""Jobs in mode adaptive: tables change inside calls, in which all ranks vote (agree/stops.h)."""

import json
import os
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Soak
from tests.serve.jobs.conftest import Player, player_of
from tests.serve.jobs.disturbing import Arbiter, arbiter_of, cuts_before, trouble_for
from tests.serve.jobs.play import Played, assert_never_split, at, every
from tests.serve.jobs.setting import Setting, make_setting
from tests.serve.jobs.thinking import brain

NAME = "libnccl-tuner-dynamiccl-adaptive.so"
JOB = {"release": "2.30", "rate": 4000, "calls": 6000}
#: Of 0.05 s that a rank stands still and 0.3 s, and a job's own.
FAULTS = ("stop=0.05", "stop=0.3", "sleep=0.1", "abort=0", "abort=0.1", "kill", "fork", "p2p")
#: What makes the ranks' calls differ, or all of them count the same more.
MISCOUNTS = ("simulate=1", "simulate=3", "capture=3,9", "bcasts=3", "symmetric=2")


@pytest.fixture(scope="session")
def play_stops(job_build_dir: Path) -> Player:
    return player_of(job_build_dir, NAME)


def assert_undisturbed(played: Played) -> None:
    assert played.is_sound, played
    assert played.asked_longest_ms < 20_000, played


def test_probes_switch_there_and_back(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    """NCCL's own choice for a moment, again and again; the table is there from call 0."""
    with arbiter_of(job_build_dir, four_ranks) as arbiter:
        played = play_stops(environment=arbiter.environment(), ranks=4, **JOB)
    assert_undisturbed(played)
    (world,) = played.communicators
    assert world.first_acted == 0
    assert world.switches >= 4, played
    assert played.acted < played.calls


def test_without_probes_nothing_changes(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    with arbiter_of(job_build_dir, four_ranks, DYNAMICCL_PROBE_CALLS="0") as arbiter:
        played = play_stops(environment=arbiter.environment(), ranks=4, **JOB)
    assert_undisturbed(played)
    assert (played.acted, played.switches) == (played.calls, 0)


def test_a_kill_file_acts_at_the_next_stop(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting, tmp_path: Path
) -> None:
    kill_file = tmp_path / "kill"
    leader = {"DYNAMICCL_PROBE_CALLS": "0", "DYNAMICCL_KILL_FILE": str(kill_file)}

    def come_and_go() -> None:
        time.sleep(1.2)
        kill_file.touch()
        time.sleep(1.2)
        kill_file.unlink()

    thread = threading.Thread(target=come_and_go)
    with arbiter_of(job_build_dir, four_ranks, **leader) as arbiter:
        thread.start()
        played = play_stops(environment=arbiter.environment(), ranks=4, **(JOB | {"calls": 16000}))
        thread.join()
    assert_undisturbed(played)
    assert played.switches == 2, played
    assert 1000 < played.calls - played.acted < 9000, played


def test_while_a_kill_file_is_there_no_communicator_gets_a_table(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting, tmp_path: Path
) -> None:
    kill_file = tmp_path / "kill"
    kill_file.touch()
    with arbiter_of(job_build_dir, four_ranks, DYNAMICCL_KILL_FILE=str(kill_file)) as arbiter:
        played = play_stops(environment=arbiter.environment(), ranks=4, **JOB)
    assert_undisturbed(played)
    assert played.acted == 0
    assert "a kill file is there" in played.log


@pytest.mark.parametrize(
    "what",
    [
        at(1500, "simulate=1", rank=1),
        at(1500, "simulate=3", rank=1),
        every(700, "simulate=1", rank="all"),
        at(1500, "capture=5,20", rank="all"),
        at(1500, "capture=5,20", rank=1),
        every(100, "p2p", rank=1),
        at(1500, "bcasts=3", rank="all"),
        every(50, "symmetric=2", rank=1),
        every(500, "fork", rank=1),
    ],
    ids=lambda what: "-".join(what[1].split(":")[1::2]),
)
def test_what_makes_counts_differ_splits_nothing(
    what: tuple[str, str], play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    """All calls are equal: nothing but NCCL's marks tells one from the next."""
    with arbiter_of(job_build_dir, four_ranks) as arbiter:
        played = play_stops(*what, environment=arbiter.environment(), ranks=4, pattern=1, **JOB)
    assert_undisturbed(played)


def test_communicators_in_opposite_order_both_switch(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    with arbiter_of(job_build_dir, four_ranks) as arbiter:
        played = play_stops(
            environment=arbiter.environment(), ranks=4, comms=2, opposite=1, run_ahead=256, **JOB
        )
    assert_undisturbed(played)
    assert all(comm.switches > 0 for comm in played.communicators), played


@pytest.mark.parametrize("seed", range(6))
def test_disjoint_shrinks_split_nothing(
    seed: int, play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    """Their members' processes vote no more, and keep the tables that they have."""
    with arbiter_of(job_build_dir, four_ranks) as arbiter:
        played = play_stops(
            environment=arbiter.environment(), ranks=4, comms=2, shrinks=1, seed=seed, **JOB
        )
    assert_undisturbed(played)
    assert played.communicators[0].acted == played.communicators[0].calls


@pytest.mark.parametrize("call", [1100, 1500, 2500])
def test_an_abort_leaves_no_two_answers(
    call: int, play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    with arbiter_of(job_build_dir, four_ranks) as arbiter:
        played = play_stops(
            *at(call, "abort=0", rank=1, comm=1),
            environment=arbiter.environment(),
            ranks=4,
            comms=3,
            threads=3,
            watchdog=0.2,
            **JOB,
        )
    assert_never_split(played)
    assert played.errors == 0, played


def test_the_worker_is_killed_again_and_again(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    with (
        arbiter_of(job_build_dir, four_ranks) as arbiter,
        trouble_for(arbiter, 1, pause_s=0.1),
    ):
        played = play_stops(environment=arbiter.environment(), ranks=4, comms=2, deadline=90, **JOB)
    assert_undisturbed(played)


@pytest.mark.parametrize("ranks", [2, 8])
def test_ranks_on_one_thread_never_wait_for_each_other(
    ranks: int, job_build_dir: Path, eight_ranks: Setting
) -> None:
    """The second context of an id in a process ends voting: the first table stays."""
    with (
        arbiter_of(job_build_dir, eight_ranks) as arbiter,
        cuts_before(arbiter.port, 0, share=0) as cutter,
    ):
        done = subprocess.run(
            [job_build_dir / "one_thread", job_build_dir / NAME, str(ranks), "3000"],
            env=os.environ | arbiter.environment(cutter.port),
            capture_output=True,
            text=True,
            check=True,
        )
    found = json.loads(done.stdout)
    assert (found["acted"], found["differ"], found["violations"]) == (3000 * ranks, 0, 0), done
    assert cutter.num_connections == ranks, done  # those of `init`


#: A few questions again and again, so that there are enough times of each.
TIMED = {"release": "2.30", "rate": 1500, "calls": 6000, "max_group": 1, "pattern": 12}
SAMPLED = {"DYNAMICCL_SAMPLE_PERCENT": "100"}


@pytest.mark.parametrize(("cell", "is_ours"), [("1:1:5", True), ("4:2:5", False)])
def test_the_guard_withdraws_what_is_slower_than_nccls_own(
    cell: str, is_ours: bool, play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    """Our table is Ring with LL128 (1:1); NCCL's own choice is NVLS (4:2) for large sizes."""
    with arbiter_of(job_build_dir, four_ranks) as arbiter:
        played = play_stops(
            "--slow", cell, environment=arbiter.environment() | SAMPLED, ranks=4, **TIMED
        )
    assert_undisturbed(played)
    assert "choices withdrawn: collective" in played.log
    assert (played.acted < played.calls / 2) == is_ours, played


def test_a_brain_decides_from_the_ranks_times(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting, known: Path
) -> None:
    leader = {"DYNAMICCL_PROBE_CALLS": "0", "DYNAMICCL_ADAPT_INTERVAL_S": "0.2"}
    with (
        brain(four_ranks, known, "restless"),
        arbiter_of(job_build_dir, four_ranks, **leader) as arbiter,
    ):
        played = play_stops(environment=arbiter.environment() | SAMPLED, ranks=4, **TIMED)
    assert_undisturbed(played)
    assert "the brain's" in played.log
    assert played.switches >= 4, played


def test_the_artifacts_policy_decides_in_the_arbiter(
    torch_build_dir: Path, eight_ranks: Setting, known: Path
) -> None:
    """TorchScript, in the worker: no rank loads it."""
    of_known = replace(eight_ranks, artifact=known)
    systems = {"DYNAMICCL_SYSTEMS": "23007=box 22809=box"}
    leader = systems | {"DYNAMICCL_ADAPT_INTERVAL_S": "0.2", "DYNAMICCL_BRAIN_SOCKET": ""}
    play = player_of(torch_build_dir, NAME)
    with arbiter_of(torch_build_dir, of_known, **leader, DYNAMICCL_PROBE_CALLS="0") as arbiter:
        played = play(
            environment=arbiter.environment() | systems | SAMPLED,
            ranks=8,
            **(TIMED | {"calls": 9000}),
        )
    assert_undisturbed(played)
    assert "the brain gave no table" not in played.log
    assert "the brain's" in played.log
    assert played.switches >= 1, played


def test_a_brain_that_fails_changes_nothing(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting, known: Path
) -> None:
    leader = {"DYNAMICCL_PROBE_CALLS": "0", "DYNAMICCL_ADAPT_INTERVAL_S": "0.2"}
    with (
        brain(four_ranks, known, "fails"),
        arbiter_of(job_build_dir, four_ranks, **leader) as arbiter,
    ):
        played = play_stops(environment=arbiter.environment() | SAMPLED, ranks=4, **TIMED)
    assert_undisturbed(played)
    assert (played.acted, played.switches) == (played.calls, 0)
    assert "the brain gave no table" in played.log


def test_a_new_artifact_acts_at_the_next_stop(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    swap = f"swap={four_ranks.artifact},{four_ranks.other_artifact}"
    with arbiter_of(job_build_dir, four_ranks, DYNAMICCL_PROBE_CALLS="0") as arbiter:
        played = play_stops(
            *at(2000, swap, rank=0), environment=arbiter.environment(), ranks=4, **JOB
        )
    assert_undisturbed(played)
    assert "a new artifact" in played.log
    assert (played.acted, played.switches) == (played.calls, 1)


def test_the_leader_writes_metrics(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting, tmp_path: Path
) -> None:
    with arbiter_of(job_build_dir, four_ranks, DYNAMICCL_METRICS_DIR=str(tmp_path)) as arbiter:
        played = play_stops(
            environment=arbiter.environment() | SAMPLED, ranks=4, **(TIMED | {"calls": 4500})
        )
        values = metrics_of(tmp_path, arbiter)
    assert_undisturbed(played)
    assert values["dynamiccl_stops_agreed"] >= 4
    assert 0 < values["dynamiccl_timed_calls"] <= 4500


def metrics_of(directory: Path, arbiter: Arbiter) -> dict[str, int]:
    """Of a job of one communicator."""
    text = (directory / f"dynamiccl-{arbiter.job}.prom").read_text()
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {line.partition("{")[0]: int(line.rpartition(" ")[2]) for line in lines}


def test_without_an_arbiter_the_table_stays(
    play_stops: Player, job_build_dir: Path, four_ranks: Setting
) -> None:
    """Both processes are killed between two stops: nothing fails, and nothing changes any more."""
    with arbiter_of(job_build_dir, four_ranks, DYNAMICCL_PROBE_CALLS="0") as arbiter:
        kill = f"sh=kill -9 {' '.join(map(str, arbiter.processes()))}"
        played = play_stops(
            *at(500, kill, rank=0), environment=arbiter.environment(), ranks=4, **JOB
        )
    assert_undisturbed(played)
    assert played.acted == played.calls


def play_at_random(seed: int, play: Player, build: Path, directory: Path) -> Played:
    """A job drawn from `seed`, whose ranks, worker and connections are disturbed."""
    random = np.random.default_rng(seed)
    num_nodes = int(random.choice([1, 1, 2]))
    num_ranks = num_nodes * int(random.integers(2, 5))
    num_slots = int(random.integers(1, 5))
    setting = make_setting(directory, num_ranks=num_ranks, num_nodes=num_nodes)
    opposite = bool(random.integers(2))
    actions: list[str] = []
    for _ in range(random.integers(0, 4)):
        call = int(random.integers(3000))
        rank, comm = int(random.integers(num_ranks)), int(random.integers(num_slots))
        actions += at(call, str(random.choice(FAULTS)), rank=rank, comm=comm)
    if random.integers(2):
        what = str(random.choice(MISCOUNTS))
        is_one = what.startswith(("simulate", "symmetric")) and bool(random.integers(2))
        rank_or_all = int(random.integers(num_ranks)) if is_one else "all"
        actions += at(int(random.integers(3000)), what, rank=rank_or_all)
    with (
        arbiter_of(build, setting) as arbiter,
        trouble_for(arbiter, seed, pause_s=float(random.choice([0.1, 0.5, 100]))),
        cuts_before(arbiter.port, seed, share=float(random.choice([0, 0, 0.1]))) as cutter,
    ):
        return play(
            *actions,
            environment=arbiter.environment(cutter.port),
            release=random.choice(["2.28", "2.29", "2.30"]),
            ranks=num_ranks,
            nodes=num_nodes,
            comms=num_slots,
            threads=int(random.integers(1, 4)),
            # In opposite order no communicator could be made anew.
            lifetime=0 if opposite else int(random.choice([0, 0, 1500])),
            create_at_once=int(random.integers(2)),
            opposite=int(opposite),
            shrinks=int(num_slots > 1 and random.integers(8) == 0),
            run_ahead=int(random.choice([1, 16, 256])),
            max_group=int(random.choice([1, 4, 8])),
            pattern=int(random.choice([1, 4, 64])),
            jitter_us=int(random.choice([0, 50, 2000])),
            rate=2000,
            calls=4000,
            seed=seed,
            watchdog=1,
            deadline=120,
        )


def assert_lawful(played: Played) -> None:
    """No two tables for one call, nothing hangs; no call and no creation fails."""
    assert_never_split(played)
    assert played.errors == 0, played


@pytest.mark.parametrize("seed", range(4))
def test_a_random_job_keeps_the_law(
    seed: int, play_stops: Player, job_build_dir: Path, tmp_path: Path
) -> None:
    assert_lawful(play_at_random(seed, play_stops, job_build_dir, tmp_path))


@pytest.mark.soak
def test_random_jobs_keep_the_law(
    build_dir: Callable[[str], Path], play_stops: Player, tmp_path: Path, soak: Soak
) -> None:
    until = time.monotonic() + soak.seconds
    seed = soak.seed
    while time.monotonic() < until:
        made = tmp_path / str(seed)
        made.mkdir()
        assert_lawful(play_at_random(seed, play_stops, build_dir(""), made))
        seed += 1
