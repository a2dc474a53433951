"""What goes wrong around the tuner's `init`: it ends within its bound, alike on all ranks."""

import fcntl
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest

from tests.serve.jobs.conftest import Inits, Player
from tests.serve.jobs.play import on_rank
from tests.serve.jobs.setting import Setting

LIMIT_MS: Final = 1000
#: What tests wait for in vain is a tenth of what a job waits for.
SHORT_LIMIT: Final = {"DYNAMICCL_TEST_LIMIT_MS": str(LIMIT_MS)}


def test_a_coordinator_that_dies_before_it_asked_fails_nobody(
    inits: Inits, four_ranks: Setting
) -> None:
    """One rank never comes, so that votes are in and nobody has confirmed when it is killed."""
    found = inits(
        four_ranks.environment() | SHORT_LIMIT,
        ranks=4,
        processes=3,
        absent=1,
        kill_coordinator_at=300,
    )
    assert (found["tables"], found["abstained"], found["failed"]) == (0, 2, 0)
    assert found["longest_ms"] < 2 * LIMIT_MS


@contextmanager
def full_pipe() -> Iterator[int]:
    """The end of a pipe that nobody reads and that holds all it can, as a terminal after Ctrl-S."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETFL, os.O_NONBLOCK)
    while True:
        try:
            os.write(writer, bytes(4096))
        except BlockingIOError:
            break
    fcntl.fcntl(writer, fcntl.F_SETFL, 0)
    try:
        yield writer
    finally:
        os.close(reader)
        os.close(writer)


def test_a_stderr_that_nobody_reads_delays_no_answer(
    inits: Inits, four_ranks: Setting, tmp_path: Path
) -> None:
    environment = four_ranks.environment() | {"DYNAMICCL_LOG_DIR": str(tmp_path)} | SHORT_LIMIT
    with full_pipe() as stderr:
        began = time.monotonic()
        found = inits(environment, stderr=stderr, ranks=4, processes=2, rounds=3)
        took_s = time.monotonic() - began
    assert (found["tables"], found["failed"]) == (12, 0)
    assert took_s < 10  # and the process ends
    (file,) = tmp_path.glob("dynamiccl-*.jsonl")
    assert [json.loads(line)["decision"] for line in file.read_text().splitlines()] == ["table"] * 3


@pytest.mark.parametrize("coordinator", [False, True], ids=["local", "coordinator"])
def test_files_that_stall_on_one_rank_make_all_abstain_within_half_the_limit(
    coordinator: bool, play_tuner: Player, four_ranks: Setting
) -> None:
    """The reading thread hangs; that rank objects, and in later communicators at once."""
    played = play_tuner(
        *on_rank(2, {"DYNAMICCL_TEST_STALL_S": "600"}),
        environment=four_ranks.environment(coordinator=coordinator) | SHORT_LIMIT,
        ranks=4,
        comms=4,
        rate=4000,
        calls=400,
    )
    assert played.is_sound, played
    for comm in played.communicators:
        assert comm.acted == (0 if 2 in comm.ranks else comm.calls), played.log
    assert "could not be read in time" in played.log
    assert played.created_longest_ms < 2 * LIMIT_MS


def test_a_creation_that_is_aborted_while_it_waits_ends_within_the_bound(
    inits: Inits, four_ranks: Setting
) -> None:
    """A tuner does not see the abort flag, and ncclCommAbort joins the creation's thread."""
    found = inits(
        four_ranks.environment() | SHORT_LIMIT, ranks=4, processes=2, absent=1, abort_at=100
    )
    assert (found["tables"], found["abstained"], found["failed"]) == (0, 3, 0)
    assert LIMIT_MS / 2 < found["longest_abort_ms"] < 2 * LIMIT_MS


@contextmanager
def crowd(port: int, size: int) -> Iterator[list[int]]:
    """So many connections to the port, always, that say nothing; counts them."""
    stop = threading.Event()
    connected = [0]

    def connect() -> None:
        kept: list[socket.socket] = []
        while not stop.wait(0.005):
            try:
                kept.append(socket.create_connection(("127.0.0.1", port), timeout=0.5))
                connected[0] += 1
            except OSError:
                continue  # nobody listens yet, or no longer
            if len(kept) > size // 4:
                kept.pop(0).close()
        for one in kept:
            one.close()

    threads = [threading.Thread(target=connect) for _ in range(4)]
    for thread in threads:
        thread.start()
    try:
        yield connected
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_strangers_who_take_all_connections_keep_nobody_from_the_answer(
    inits: Inits, four_ranks: Setting
) -> None:
    environment = four_ranks.environment(coordinator=True)
    port = int(environment["DYNAMICCL_COORDINATOR"].rpartition(":")[2])
    with crowd(port, 400) as connected:
        # The last rank is late, so that the crowd is there before the votes are.
        found = inits(environment, ranks=4, processes=2, rounds=10, late=1500)
    assert connected[0] > 128
    assert (found["tables"], found["abstained"], found["failed"]) == (40, 0, 0)
    assert found["longest_ms"] < 10_000


@pytest.mark.parametrize("coordinator", [False, True], ids=["local", "one-port"])
def test_two_steps_of_one_allocation_are_two_jobs(
    coordinator: bool, inits: Inits, four_ranks: Setting
) -> None:
    """`dynamiccl-run srun ... &`, twice; here both even use the same ids."""
    environment = four_ranks.environment(coordinator=coordinator) | SHORT_LIMIT
    environment |= {"DYNAMICCL_JOB_ID": "77", "SLURM_JOB_ID": "77"}
    with ThreadPoolExecutor() as pool:
        both = list(
            pool.map(
                lambda step: inits(
                    environment | {"SLURM_STEP_ID": step}, ranks=4, processes=2, rounds=3, late=200
                ),
                ("0", "1"),
            )
        )
    assert [found["failed"] for found in both] == [0, 0]
    tables = sorted(found["tables"] for found in both)
    # Over one port the second one finds the first one's coordinator there, and keeps NCCL's choice.
    assert tables == [12, 12] if not coordinator else tables[1] == 12, tables


#: Where `kind` and `nonce` lie in a request, and `kind` in an answer (tuner/message.h).
REQUEST_BYTES: Final = 50 + 1024 + 158 + 32
REQUEST_KIND, REQUEST_NONCE, ANSWER_KIND = 48, slice(32, 40), 24
CONFIRM, STILL_HERE, TABLE = 3, 3, 4


class Between:
    """Stands between the coordinator and the other processes, and kills it at the worst moment."""

    def __init__(self, port: int, pid_file: Path, *, at_first_table: bool) -> None:
        self.asked_still_here: set[bytes] = set()
        self._to, self._pid_file, self._at_first_table = port, pid_file, at_first_table
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> "Between":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.join()

    def _run(self) -> None:
        """One question and its answer after the other, until the coordinator is dead."""
        with self._listener:
            while True:
                connection, _ = self._listener.accept()
                with connection:
                    if self._has_killed(connection):
                        return

    def _has_killed(self, connection: socket.socket) -> bool:
        request = received(connection, REQUEST_BYTES)
        if len(request) < REQUEST_BYTES:
            return False
        is_confirm = request[REQUEST_KIND] == CONFIRM
        if is_confirm and not self._at_first_table:
            self._kill()
            return True
        answer = self._asked(request)
        if not answer:
            return False  # it does not listen yet
        if answer[ANSWER_KIND] == STILL_HERE:
            self.asked_still_here.add(request[REQUEST_NONCE])
        is_table = answer[ANSWER_KIND] == TABLE
        if is_table:
            self._kill()
        connection.sendall(answer)
        return is_table

    def _asked(self, request: bytes) -> bytes:
        try:
            with socket.create_connection(("127.0.0.1", self._to), timeout=5) as coordinator:
                coordinator.sendall(request)
                return received(coordinator, 1 << 16)
        except OSError:
            return b""

    def _kill(self) -> None:
        os.kill(int(self._pid_file.read_text()), signal.SIGKILL)


def received(connection: socket.socket, size: int) -> bytes:
    """So many bytes, or all there are until the other side closes."""
    found = b""
    while len(found) < size and (piece := connection.recv(size - len(found))):
        found += piece
    return found


@pytest.mark.parametrize("at_first_table", [False, True], ids=["first-confirm", "first-table"])
def test_a_coordinator_killed_after_a_confirm_fails_those_who_confirmed_within_the_bound(
    at_first_table: bool, inits: Inits, four_ranks: Setting, tmp_path: Path
) -> None:
    """The one case in which we end a job. Nobody hangs in `init`; threads are not left bound."""
    environment = four_ranks.environment(coordinator=True) | SHORT_LIMIT
    port = int(environment["DYNAMICCL_COORDINATOR"].rpartition(":")[2])
    pid_file = tmp_path / "pid"
    with Between(port, pid_file, at_first_table=at_first_table) as between:
        found = inits(
            environment
            | {"INIT_RANKS_OTHERS": between.address, "INIT_RANKS_PID_FILE": str(pid_file)},
            ranks=4,
            processes=4,
            bind=1,
        )
    # The first rank died with the coordinator, and may have had its table just before.
    others = found["tables"] + found["abstained"] + found["failed"]
    assert others in {3, 4}
    if at_first_table:
        assert found["tables"] == 1 + (others - 3)
        assert (found["abstained"], found["failed"]) == (0, 2)
    else:
        assert (found["tables"], found["failed"]) == (0, len(between.asked_still_here))
        assert found["failed"] >= 1
    assert (
        found["said"].count("this communicator must not be used: this rank had confirmed")
        == (found["failed"])
    )
    assert 3 * LIMIT_MS <= found["longest_ms"] < 6 * LIMIT_MS
    assert found["bound_wrongly"] == 0 or os.cpu_count() == 1
