"""Jobs and faults drawn at random: nothing may split the ranks or hold them up."""

import threading
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from numpy.random import Generator

from tests.conftest import Soak
from tests.serve.jobs.arbiter import Arbiter
from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import Played, assert_never_split, at
from tests.serve.jobs.setting import NCCL_CODES, Setting, make_setting

CALLS = 3000
#: What may come at any call, to any rank.
FAULTS = ("kill", "stop=0.7", "sleep=0.5", "abort=0", "abort=0.3", "fork", "swap", "p2p")
#: What makes the ranks' calls differ in number, or all of them count the same more.
MISCOUNTS = ("simulate=3", "capture=7,9", "bcasts=3")


def draw_actions(random: Generator, setting: Setting, num_ranks: int, num_slots: int) -> list[str]:
    actions: list[str] = []
    for _ in range(random.integers(0, 4)):
        what = FAULTS[random.integers(len(FAULTS))]
        if what == "swap":
            what += f"={setting.artifact},{setting.other_artifact}"
        rank = int(random.integers(num_ranks))
        call = int(random.choice([0, 10, 50, 100, 300, 1000, 2000]) + random.integers(20))
        actions += at(call, what, rank=rank, comm=int(random.integers(num_slots)))
    if random.integers(2):
        what = MISCOUNTS[random.integers(len(MISCOUNTS))]
        actions += at(int(random.integers(CALLS)), what, rank="all")
    return actions


def play_at_random(
    seed: int, play: Player, directory: Path, start: Callable[..., Arbiter] | None = None
) -> Played:
    """A job drawn from `seed`, with its files in `directory`; of mode table where it gets arbiters.

    Then half of those on one node vote by a word, and the arbiter's worker is killed at some time.
    """
    random = np.random.default_rng(seed)
    num_nodes = int(random.choice([1, 1, 2]))
    num_ranks = num_nodes * int(random.integers(2, 5))
    num_slots = int(random.integers(1, 7))
    setting = make_setting(directory, num_ranks=num_ranks, num_nodes=num_nodes)
    environment = setting.environment(coordinator=num_nodes > 1 or bool(random.integers(2)))
    if start is not None and (num_nodes > 1 or random.integers(2)):
        arbiter = start(setting)
        environment = setting.by_arbiter(arbiter.address)
        threading.Timer(random.uniform(0, 2), arbiter.kill_worker).start()
    played = play(
        *draw_actions(random, setting, num_ranks, num_slots),
        environment=environment,
        release=random.choice(list(NCCL_CODES)),
        ranks=num_ranks,
        nodes=num_nodes,
        comms=num_slots,
        threads=int(random.integers(1, 4)),
        lifetime=int(random.choice([0, 0, 100, 1500])),
        create_at_once=int(random.integers(2)),
        run_ahead=int(random.choice([1, 16, 256])),
        max_group=int(random.choice([1, 4, 8])),
        jitter_us=int(random.choice([0, 50, 2000])),
        rate=1500,
        calls=CALLS,
        seed=seed,
        watchdog=1,
        deadline=120,  # eight ranks under ThreadSanitizer take 35 s on two cores
    )
    setting.sweep()
    return played


def play_for_a_while(play: Player, directory: Path, soak: Soak) -> None:
    """Jobs of one seed after the other, at least one, until the time is over."""
    until = time.monotonic() + soak.seconds
    for seed in count(soak.seed):
        made = directory / str(seed)
        made.mkdir()
        assert_never_split(play_at_random(seed, play, made))
        if time.monotonic() >= until:
            return


@pytest.mark.parametrize("seed", range(4))
def test_a_random_job_never_splits(seed: int, play_job: Player, tmp_path: Path) -> None:
    assert_never_split(play_at_random(seed, play_job, tmp_path))


@pytest.mark.parametrize("seed", range(6))
def test_a_random_job_of_mode_table_never_splits_nor_fails(
    seed: int, play_tuner: Player, tmp_path: Path, arbiter: Callable[..., Arbiter]
) -> None:
    played = play_at_random(seed, play_tuner, tmp_path, arbiter)
    assert_never_split(played)
    assert played.errors == 0, played


@pytest.mark.soak
def test_random_jobs_never_split(play_job: Player, tmp_path: Path, soak: Soak) -> None:
    play_for_a_while(play_job, tmp_path, soak)
