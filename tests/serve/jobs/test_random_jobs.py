"""Jobs and faults drawn at random: nothing may split the ranks, fail them or hold them up."""

import contextlib
import subprocess
import time
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from numpy.random import Generator

from dynamiccl.libraries import ADAPTIVE_NAME, TUNER_NAME
from tests.conftest import Soak
from tests.plugin_build import SANITIZERS, TUNER_TARGET
from tests.serve.jobs.arbiter import (
    OFTEN,
    Arbiter,
    Between,
    arbiter_of,
    assert_no_report,
    trouble_for,
)
from tests.serve.jobs.conftest import Inits, player_of
from tests.serve.jobs.play import ALL, at, play, stop
from tests.serve.jobs.setting import NCCL_CODES, Setting, make_setting

CALLS: Final = 3000
#: What may come at any call, to any rank.
FAULTS: Final = (
    *("kill", stop(0.05), stop(0.5), "sleep=0.2", "abort=0", "abort=0.2", "fork", "swap", "p2p"),
)
#: What makes the ranks' calls differ, or all of them count the same more.
MISCOUNTS: Final = ("simulate=1", "simulate=3", "capture=3,9", "bcasts=3", "symmetric=2")
LIBRARIES: Final = (TUNER_NAME, ADAPTIVE_NAME)


def draw_actions(random: Generator, setting: Setting, num_ranks: int, num_slots: int) -> list[str]:
    actions: list[str] = []
    for _ in range(random.integers(0, 4)):
        what = str(random.choice(FAULTS))
        if what == "swap":
            what += f"={setting.artifact},{setting.other_artifact}"
        rank, call = int(random.integers(num_ranks)), int(random.choice([10, 100, 1000, CALLS]))
        actions += at(
            int(random.integers(call)), what, rank=rank, comm=int(random.integers(num_slots))
        )
    if random.integers(2):
        what = str(random.choice(MISCOUNTS))
        is_one = what.startswith(("simulate", "symmetric")) and bool(random.integers(2))
        rank = int(random.integers(num_ranks)) if is_one else ALL
        actions += at(int(random.integers(CALLS)), what, rank=rank)
    return actions


def assert_lawful_at_random(seed: int, library: str, build: Path, directory: Path) -> None:
    """A job drawn from `seed`, whose ranks, arbiter's worker and connections are disturbed.

    Of mode `table`, half of those on one node vote by a word.
    """
    random = np.random.default_rng(seed)
    is_adaptive = library == ADAPTIVE_NAME
    releases = [name for name in NCCL_CODES if not is_adaptive or name >= "2.28"]
    num_nodes = int(random.choice([1, 1, 2]))
    num_ranks = num_nodes * int(random.integers(2, 5))
    num_slots = int(random.integers(1, 7))
    setting = make_setting(directory, num_ranks=num_ranks, num_nodes=num_nodes)
    opposite = bool(random.integers(2))
    with contextlib.ExitStack() as stack:
        environment = setting.environment()
        sampled = str(random.choice([0, 1, 1, 100]))
        if is_adaptive or num_nodes > 1 or random.integers(2):
            arbiter = stack.enter_context(arbiter_of(build, setting))
            pause_s = float(random.choice([0.1, 0.5, 100]))
            stack.enter_context(trouble_for(arbiter, seed, pause_s=pause_s))
            share = float(random.choice([0, 0, 0.1]))
            cutter = stack.enter_context(Between(arbiter.port, seed=seed, share=share))
            environment = setting.by_arbiter(cutter.address)
        player_of(build, library)(
            *draw_actions(random, setting, num_ranks, num_slots),
            environment=environment | OFTEN | {"DYNAMICCL_SAMPLE_PERCENT": sampled},
            release=random.choice(releases),
            ranks=num_ranks,
            nodes=num_nodes,
            comms=num_slots,
            threads=int(random.integers(1, 4)),
            # In opposite order no communicator could be made anew, nor of another one.
            lifetime=0 if opposite else int(random.choice([0, 0, 50, 700, 1500])),
            destroy=int(random.integers(4) > 0),
            kernel_drop=int(random.choice([0, 20])),
            kernel_duplicate=int(random.choice([0, 10])),
            kernel_delay_us=int(random.choice([0, 500, 5000])),
            create_at_once=int(random.integers(2)),
            opposite=int(opposite),
            shrinks=int(num_slots > 1 and not opposite and random.integers(8) == 0),
            run_ahead=int(random.choice([1, 16, 256])),
            max_group=int(random.choice([1, 4, 8])),
            pattern=int(random.choice([1, 4, 64])),
            jitter_us=int(random.choice([0, 50, 1000])),
            rate=2000,
            calls=CALLS,
            seed=seed,
            watchdog=1,
            deadline=120,  # eight ranks under ThreadSanitizer take 35 s on two cores
        )
    setting.sweep()
    assert_no_report(setting)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("library", LIBRARIES)
def test_random_job_is_lawful(library: str, seed: int, job_build_dir: Path, tmp_path: Path) -> None:
    assert_lawful_at_random(seed, library, job_build_dir, tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("sanitize", SANITIZERS)
@pytest.mark.parametrize("library", LIBRARIES)
def test_random_jobs_keep_the_law_and_are_clean(
    library: str, sanitize: str, build_dir: Callable[[str], Path], tmp_path: Path, soak: Soak
) -> None:
    until = time.monotonic() + soak.seconds
    for seed in count(soak.seed):
        (made := tmp_path / str(seed)).mkdir()
        assert_lawful_at_random(seed, library, build_dir(sanitize), made)
        if time.monotonic() >= until:
            return


#: Slow enough that ranks under a sanitizer keep up.
JOB: dict[str, Any] = {
    "law": "alike",
    "ranks": 4,
    "rate": 500,
    "calls": 1500,
    "comms": 4,
    "threads": 2,
}


def test_a_plain_job_is_clean(build_dir: Callable[..., Path], setting: Setting) -> None:
    """The tuner alone is sanitized: the ranks' program takes the sanitizer's runtime along."""
    plugin = build_dir("address,undefined", TUNER_TARGET) / TUNER_NAME
    find = ["c++", "-print-file-name=libasan.so"]
    runtime = subprocess.run(find, capture_output=True, text=True, check=True).stdout.strip()
    preloaded = {"LD_PRELOAD": runtime, "ASAN_OPTIONS": "detect_leaks=0"}
    environment = setting.environment() | preloaded
    played = play(build_dir("") / "play_rank", plugin, environment=environment, **JOB)
    assert played.acted > 0


def test_creations_at_once_are_free_of_races(
    build_dir: Callable[..., Path], setting: Setting, arbiter: Callable[..., Arbiter]
) -> None:
    """Whole jobs whose communicators are made at once; ranks that are threads of one process."""
    directory = build_dir("thread", (*TUNER_TARGET, "play_rank", "init_ranks"))
    by_arbiter = setting.by_arbiter(arbiter().address)
    for release, environment in (("2.27", by_arbiter), ("2.30", setting.environment())):
        played = player_of(directory, TUNER_NAME)(
            environment=environment, release=release, create_at_once=1, **(JOB | {"comms": 8})
        )
        assert played.acted > 0
        found = Inits(directory, setting)(environment, ranks=4, processes=2, rounds=8, at_once=1)
        assert "Sanitizer" not in found["said"], found["said"]
        assert (found["tables"], found["failed"]) == (32, 0)
