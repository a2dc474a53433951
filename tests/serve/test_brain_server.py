"""The process that leaders ask: several at once, hostile ones, failing policies; the command."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from dynamiccl.errors import UserError
from dynamiccl.serve import brain_server as server_module
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain_policies import Brain, KeepBrain
from dynamiccl.serve.brain_server import LENGTH, MAX_ASK_BYTES, BrainServer, Question
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.torchscript import BrainConfig, History
from tests.serve.brains import CONFIG
from tests.serve.leader import NOTHING, Leader, encode_question


class CountingBrain:
    """Answers with a table whose number of ranks is how often it was asked."""

    def __init__(self) -> None:
        self.asked = 0

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        assert history == NOTHING
        self.asked += 1
        if config.system == "fail":
            raise ValueError("no idea")
        rows = [[None]] * 5
        return DecisionTable.from_configs(rows, num_nodes=1, num_ranks=self.asked)


@contextmanager
def serving(path: Path, make: type[Brain] = CountingBrain) -> Iterator[BrainServer]:
    with BrainServer(path, make) as server:
        thread = threading.Thread(target=server.serve)
        thread.start()
        yield server
        server.stop()
        thread.join(20)
        assert not thread.is_alive()


@pytest.fixture(autouse=True)
def close_leaders() -> Iterator[None]:
    yield
    while Leader.opened:
        Leader.opened.pop().close()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "brain.sock"


def test_socket_is_ours_alone_and_goes_with_the_server(path: Path) -> None:
    with serving(path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        Leader(path, CONFIG).ask()
    assert not path.exists()


def test_leaders_at_once_each_have_a_brain_of_their_own(path: Path) -> None:
    with serving(path), ThreadPoolExecutor(8) as pool:

        def ask(_: int) -> list[int]:
            leader = Leader(path, CONFIG)
            tables = [leader.ask().table for _ in range(20)]
            return [table.num_ranks for table in tables if table]

        assert list(pool.map(ask, range(16))) == [list(range(1, 21))] * 16


@pytest.mark.parametrize(
    "nonsense",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 10,
        LENGTH.pack(MAX_ASK_BYTES + 1),
        LENGTH.pack(3) + b"abc",
        LENGTH.pack(0),
        LENGTH.pack(64) + bytes(64),
    ],
)
def test_who_talks_nonsense_is_hung_up_on_and_others_are_served(
    path: Path, nonsense: bytes
) -> None:
    with serving(path):
        good, bad = Leader(path, CONFIG), Leader(path, CONFIG)
        good.ask()
        bad.connection.sendall(nonsense)
        assert bad.is_hung_up_on()
        assert good.ask().table is not None


def test_leader_that_goes_in_the_middle_of_a_question_is_forgotten(path: Path) -> None:
    with serving(path) as server:
        leader = Leader(path, CONFIG)
        leader.connection.sendall(encode_question(Question(1, CONFIG, NOTHING))[:20])
        leader.connection.close()
        assert Leader(path, CONFIG).ask().table is not None
        deadline = time.monotonic() + 20
        while len(server._connections) > 1 and time.monotonic() < deadline:
            time.sleep(0.01)
        assert len(server._connections) == 1  # of the leader that was served


def test_policy_that_fails_is_an_error_and_is_asked_again(path: Path) -> None:
    with serving(path):
        leader = Leader(path, CONFIG)
        failed = leader.ask(config=BrainConfig("", "fail", 1, 8))
        assert failed.error == "ValueError: no idea"
        table = leader.ask().table
        assert table is not None
        assert table.num_ranks == 2


def test_more_leaders_than_are_served_are_hung_up_on(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server_module, "MAX_LEADERS", 2)
    with serving(path):
        leaders = [Leader(path, CONFIG) for _ in range(2)]
        for leader in leaders:
            leader.ask()
        assert Leader(path, CONFIG).is_hung_up_on()
        assert leaders[0].ask().table is not None


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root to be somebody else")
def test_another_user_is_hung_up_on() -> None:
    ask = (
        "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); "
        "s.settimeout(20); print(s.recv(1))"
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "brain.sock"
        with serving(path):
            Path(folder).chmod(0o755)
            path.chmod(0o666)
            done = subprocess.run(
                ["/usr/bin/env", "python3", "-c", ask, path],
                user=12345,
                env={"PATH": "/usr/bin:/bin"},
                cwd="/",
                capture_output=True,
                text=True,
                check=True,
            )
            assert done.stdout == "b''\n"


def test_socket_of_a_killed_server_is_taken_over(path: Path) -> None:
    left_over = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    left_over.bind(str(path))
    left_over.close()
    with serving(path):
        assert Leader(path, CONFIG).ask().table is not None


def test_paths_that_cannot_be_had(path: Path, tmp_path: Path) -> None:
    with serving(path), pytest.raises(UserError, match=r"listens at .* already"):
        BrainServer(path, KeepBrain)
    (tmp_path / "file").write_text("precious")
    with pytest.raises(UserError, match="not a socket"):
        BrainServer(tmp_path / "file", KeepBrain)
    with pytest.raises(UserError, match="too long"):
        BrainServer(tmp_path / ("x" * 108), KeepBrain)
    with pytest.raises(UserError, match="no directory"):
        BrainServer(tmp_path / "none" / "brain.sock", KeepBrain)


@contextmanager
def command(artifact: Path, path: Path, policy: str) -> Iterator[subprocess.Popen[str]]:
    arguments = ["brain", "--policy", policy, "--artifact", artifact, "--socket", path, "--json"]
    process = subprocess.Popen(
        [sys.executable, "-c", "import dynamiccl.serve.cli as c; c.main()", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    yield process
    process.kill()
    process.communicate()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_command_says_where_it_listens_and_ends_cleanly(
    small_artifact: Artifact, path: Path, number: signal.Signals
) -> None:
    with command(small_artifact.directory, path, "table") as process:
        assert process.stdout is not None
        started = json.loads(process.stdout.readline())
        assert started == {
            "socket": str(path),
            "policy": "table",
            "artifact": str(small_artifact.directory),
        }
        leader = Leader(path, CONFIG)
        table = leader.ask().table
        assert table == DecisionTable.read(small_artifact.directory / small_artifact.tables[0].path)
        process.send_signal(number)
        out, err = process.communicate(timeout=20)
    assert (process.returncode, out) == (0, "")
    assert err.splitlines()[-1].endswith("stopped")
    assert not path.exists()
    assert leader.is_hung_up_on()
