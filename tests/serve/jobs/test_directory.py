"""The directory of a job in mode adaptive: many ranks, few descriptors, and no connection for long.

World rank 0 has two connections of each rank at first: one to the directory, one to the leader that
it found there. It takes half of the descriptors that a process may have, 16,384 at most, so that in
worlds of more than 8,192 ranks the second ones wait until the first ones have been closed.
"""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from tests.serve.jobs.conftest import Player
from tests.serve.jobs.setting import Setting, make_setting

ESTABLISHED: Final = "01"


def num_connected(port: int) -> int:
    """Connections that were accepted at this port (proc(5), /proc/net/tcp)."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[1].endswith(f":{port:04X}") and row[3] == ESTABLISHED for row in rows)


def test_connections_to_the_directory_are_closed_once_all_is_known(
    play_job: Player, four_ranks: Setting
) -> None:
    environment = four_ranks.environment(coordinator=True)
    port = int(environment["DYNAMICCL_COORDINATOR"].rpartition(":")[2])
    seen: list[tuple[float, int]] = []
    with ThreadPoolExecutor() as pool:
        job = pool.submit(
            play_job, environment=environment, ranks=4, comms=2, rate=1000, calls=8000
        )
        while not job.done():
            seen.append((time.monotonic(), num_connected(port)))
            time.sleep(0.02)
        ended = time.monotonic()
    played = job.result()
    assert played.is_sound, played
    assert played.acted > 0
    assert max(count for _, count in seen) > 0
    # A second before the job ends, and they stay so; a busy machine looks seldom in that second.
    last = [count for at, count in seen if at > ended - 1.0]
    assert last == [0] * len(last) != []


def test_a_world_of_more_ranks_than_half_the_connections_agrees_all_the_same(
    play_job: Player, tmp_path: Path
) -> None:
    """16 ranks where world rank 0 may have 22 connections, as 12,000 where it may have 16,384."""
    setting = make_setting(tmp_path, num_ranks=16)
    environment = setting.environment(coordinator=True)
    played = play_job(environment=environment, descriptors=44, ranks=16, rate=300, calls=1800)
    assert played.is_sound, played
    [world] = played.communicators
    assert world.acted > 0, played.log


def test_a_world_that_its_leader_cannot_connect_to_abstains(
    play_job: Player, tmp_path: Path
) -> None:
    setting = make_setting(tmp_path, num_ranks=16)
    environment = setting.environment(coordinator=True)
    played = play_job(environment=environment, descriptors=30, ranks=16, rate=300, calls=300)
    assert (played.is_sound, played.acted) == (True, 0), played
    assert "raise its ulimit -n to more than twice the ranks" in played.log
