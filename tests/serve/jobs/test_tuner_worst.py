"""What goes wrong around the tuner's `init`: it ends within its bound, alike on all ranks."""

import contextlib
import os
import signal
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from tests.serve.jobs.arbiter import Arbiter, Between
from tests.serve.jobs.conftest import Inits, Voting
from tests.serve.jobs.setting import FIRST, prepared, write_artifact

LIMIT_MS: Final = 1000
#: What tests wait for in vain is a tenth of what a job waits for.
SHORT_LIMIT: Final = {"DYNAMICCL_TEST_LIMIT_MS": str(LIMIT_MS)}
Start = Callable[..., Arbiter]

by_both = pytest.mark.parametrize("by_arbiter", [False, True], ids=["word", "arbiter"])


def counts(found: dict[str, Any]) -> tuple[int, int, int]:
    return found["tables"], found["abstained"], found["failed"]


@by_both
@pytest.mark.parametrize(
    ("options", "abstain"),
    [
        # One never comes, so that the others' votes are in when one of them is killed.
        ({"processes": 3, "absent": 1, "kill_at": 300}, 2),
        # As one whose file system stalls before it votes.
        ({"processes": 4, "late": 3 * LIMIT_MS}, 4),
        # A tuner does not see the abort flag, and ncclCommAbort joins the creation's thread.
        ({"processes": 2, "absent": 1, "abort_at": 100}, 3),
    ],
    ids=["killed", "late", "aborted"],
)
def test_whoever_waits_in_vain_abstains_within_the_bound(
    options: dict[str, Any],
    abstain: int,
    by_arbiter: bool,
    inits: Inits,
    voting: Voting,
) -> None:
    environment = voting(by_arbiter, LIMIT_MS)
    found = inits(environment, ranks=4, **options)
    assert counts(found) == (0, abstain, 0)
    assert found["longest_ms"] < 2 * LIMIT_MS
    if "abort_at" in options:
        assert LIMIT_MS / 2 < found["longest_abort_ms"] < 2 * LIMIT_MS
    if "late" in options:
        assert found["ms"][0] < LIMIT_MS / 2  # from the late one's entry on
        assert not list(Path("/dev/shm").glob(f"dynamiccl-*-{inits.setting.job}-*"))


def test_processes_with_a_dev_shm_each_abstain_and_wait_long_once(inits: Inits) -> None:
    """As containers of one host without a common one."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("no mount namespaces here: nothing was checked")
    found = inits(SHORT_LIMIT, ranks=4, processes=2, rounds=4, own_shm=1)
    assert counts(found) == (0, 16, 0)
    first, second, *others = found["ms"]
    assert first >= LIMIT_MS - 100
    assert LIMIT_MS / 10 - 10 <= second < LIMIT_MS / 2
    assert max(others) < LIMIT_MS / 4


def test_a_full_dev_shm_makes_all_abstain(inits: Inits) -> None:
    """Where `ftruncate` would succeed, and the first write to the memory be a SIGBUS."""
    full = "mount -t tmpfs -o size=8k tmpfs /dev/shm && head -c 8192 /dev/zero >/dev/shm/full"
    if subprocess.run(["unshare", "-m", "sh", "-c", full], check=False).returncode:
        pytest.skip("no mount namespaces here: nothing was checked")
    within = ["unshare", "-m", "sh", "-c", full + ' && exec "$0" "$@"']
    found = inits(within=within, ranks=4, processes=4)
    assert counts(found) == (0, 4, 0)
    assert found["longest_ms"] < LIMIT_MS


def test_strangers_on_all_connections_keep_nobody_waiting(inits: Inits, arbiter: Start) -> None:
    started = arbiter()
    with contextlib.ExitStack() as stack:
        for _ in range(400):
            address = ("127.0.0.1", started.port)
            stack.enter_context(socket.create_connection(address, timeout=0.5))
        found = inits(inits.setting.by_arbiter(started.address), ranks=4, processes=2, rounds=10)
    assert counts(found) == (40, 0, 0)
    assert found["longest_ms"] < 10_000


def test_an_arbiter_minds_no_signal_and_no_lost_keeper(inits: Inits, arbiter: Start) -> None:
    """What a launcher sends to all processes of a step is not for it."""
    started = arbiter()
    environment = inits.setting.by_arbiter(started.address)
    for pid in started.processes():
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP):
            os.kill(pid, number)
    assert counts(inits(environment, ranks=4, processes=2)) == (4, 0, 0)
    os.kill(started.processes()[0], signal.SIGKILL)
    assert counts(inits(environment, ranks=4, processes=2, rounds=2)) == (4, 4, 0)


def test_an_arbiter_with_few_descriptors_answers_all_alike(inits: Inits, tmp_path: Path) -> None:
    artifact = write_artifact(tmp_path / "large", FIRST, [(1, 4), (1, 24)])
    program = ["prlimit", "--nofile=16", str(inits.directory / "dynamiccl-arbiter")]
    with Arbiter(program, inits.setting.job, LIMIT_MS) as started:
        environment = inits.setting.by_arbiter(started.address) | SHORT_LIMIT | prepared(artifact)
        found = inits(environment, ranks=24, processes=24, rounds=3)
        assert (found["failed"], found["tables"] % 24) == (0, 0)
        found = inits(environment, ranks=4, processes=4, rounds=4)
        assert counts(found) == (4, 12, 0)  # the first three ids have their answers


@by_both
def test_steps_of_one_allocation_are_jobs(by_arbiter: bool, inits: Inits, voting: Voting) -> None:
    """`dynamiccl-run srun ... &`, twice; here both even use the same ids."""
    environment = voting(by_arbiter, LIMIT_MS)
    with ThreadPoolExecutor() as pool:
        both = list(
            pool.map(
                lambda job: inits(
                    environment | {"DYNAMICCL_JOB": job}, ranks=4, processes=2, rounds=3, late=200
                ),
                (inits.setting.job, "0123456789abcdef"),
            )
        )
    # The second one finds the first one's arbiter on the port, and keeps NCCL's choice.
    assert counts(both[0]) == (12, 0, 0)
    assert counts(both[1]) == ((0, 12, 0) if by_arbiter else (12, 0, 0))
    assert both[1]["longest_ms"] < LIMIT_MS


def test_a_port_on_which_nobody_answers_is_waited_at_long_once(inits: Inits) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        environment = inits.setting.by_arbiter(f"127.0.0.1:{silent.getsockname()[1]}")
        found = inits(environment | SHORT_LIMIT, ranks=4, processes=2, rounds=4)
    assert counts(found) == (0, 16, 0)
    first, second, *others = found["ms"]
    assert LIMIT_MS <= first < 3 * LIMIT_MS  # two limits, in which votes and the answer may come
    assert second < LIMIT_MS / 2
    assert max(others) < LIMIT_MS / 4


#: What is lost at the first message of a kind, and how many ranks may have the table then.
Loss = Callable[[Arbiter, Between], None]
LOSSES: Final[dict[str, tuple[str, Loss, set[int]]]] = {
    "worker-killed-at-the-first-vote": ("vote", lambda a, _: a.kill_worker(), {0, 4}),
    "worker-killed-at-the-first-confirm": ("confirm", lambda a, _: a.kill_worker(), {0}),
    "worker-killed-at-the-first-table": ("table", lambda a, _: a.kill_worker(), {4}),
    "both-stand-still-at-the-first-confirm": ("confirm", lambda a, _: a.stop_for(1.5), {0, 4}),
    "both-stand-still-at-the-first-table": ("table", lambda a, _: a.stop_for(1.5), {4}),
    "a-proxy-accepts-and-closes": ("", lambda _, b: b.disturb("close"), {0}),
    "and-does-after-the-first-confirm": ("confirm", lambda _, b: b.disturb("close", 1.5), {0}),
    "and-does-at-the-first-table": ("table", lambda _, b: b.disturb("close", 1.5), {4}),
    "a-black-hole-from-the-first-confirm-on": (
        *("confirm", lambda _, b: b.disturb("swallow", 1.5)),
        {0, 4},
    ),
    "a-black-hole-from-the-first-table-on": (
        *("table", lambda _, b: b.disturb("swallow", 1.5)),
        {4},
    ),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_what_is_lost_on_the_way_fails_nobody(loss: str, inits: Inits, arbiter: Start) -> None:
    """And never a table beside an abstention."""
    when, lose, tables = LOSSES[loss]
    started = arbiter(limit_ms=LIMIT_MS)
    with Between(started.port, lambda between: lose(started, between), when) as between:
        environment = inits.setting.by_arbiter(between.address) | SHORT_LIMIT
        found = inits(environment, ranks=4, processes=4)
    assert found["failed"] == 0
    assert (found["tables"], found["abstained"]) in {(n, 4 - n) for n in tables}, between.passed
    assert found["longest_ms"] < 6 * LIMIT_MS


def test_who_never_hears_fails_within_the_answer_limit(inits: Inits, arbiter: Start) -> None:
    """The one case in which we end a job. Nobody hangs in `init`; threads are not left bound."""
    short_ms = 100  # and 3 s for 300
    started = arbiter(limit_ms=short_ms)
    with Between(started.port, lambda between: between.disturb("swallow"), "confirm") as between:
        environment = inits.setting.by_arbiter(between.address)
        environment |= {"DYNAMICCL_TEST_LIMIT_MS": str(short_ms)}
        found = inits(environment, ranks=4, processes=4, bind=1)
    asked = between.passed["still there?"]
    assert asked >= 1
    assert counts(found) == (0, 4 - asked, asked)
    lost = "this communicator must not be used: the arbiter is lost"
    assert found["said"].count(lost) == asked
    assert 3000 <= found["longest_ms"] < 15_000
    assert found["bound_wrongly"] == 0 or os.cpu_count() == 1
