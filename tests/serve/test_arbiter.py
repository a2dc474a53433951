"""The arbiter as `dynamiccl-run` starts and finds it: launchers, restarts, names and ports.

Ranks are programs that show their environment; what the arbiter answers to votes is in
`jobs/test_tuner_worst.py`.
"""

import os
import signal
import socket
import socketserver
import subprocess
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import takewhile
from pathlib import Path

import pytest

from tests.cluster.slurm import wait_until
from tests.fakes.nvml.build import build_fake_nvml
from tests.serve.conftest import Runner
from tests.serve.jobs.arbiter import is_gone, processes_of, send

NO_ANSWER = "no arbiter of this job answers"
#: Instead of ten seconds.
LIMIT_S = 2


class Job(Runner):
    """A job of several hosts, all of which are this one: launchers, and their ranks."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.env |= {
            "RUN": str(home / "bin" / "dynamiccl-run"),
            "DYNAMICCL_ARTIFACT": str(home / "none"),  # an arbiter needs none
            "DYNAMICCL_TEST_LIMIT_MS": str(LIMIT_S * 1000),
            "TORCHELASTIC_RUN_ID": os.urandom(8).hex(),
            "WORLD_SIZE": "8",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "127.0.0.1",
        }

    @contextmanager
    def launcher(
        self, script: str, **env: str
    ) -> Iterator[tuple["subprocess.Popen[str]", list[str]]]:
        """A launcher that has run a script, and its ranks' lines; it ends with the block."""
        process = subprocess.Popen(
            ["sh", "-c", f"{script}\necho ready; read line"],
            env={**self.env, **env},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert process.stdout is not None
        try:
            lines = takewhile(lambda line: line != "ready\n", process.stdout)
            yield process, [line.strip() for line in lines]
        finally:
            process.kill()
            process.communicate()

    def of_rank(self, rank: int, **env: str) -> tuple[dict[str, str], str]:
        """What a rank shows, and what it said besides."""
        done = self("env", env={"RANK": str(rank), **env})
        assert done.returncode == 0, done.stderr
        lines = [line for line in done.stderr.splitlines() if "plugin.index" not in line]
        return dict(line.split("=", 1) for line in done.stdout.splitlines()), "\n".join(lines)

    def processes(self) -> list[int]:
        """The keeper's and the worker's, as far as they live."""
        return processes_of(f"{self.home}/bin/dynamiccl-arbiter")

    @property
    def port(self) -> int:
        """Of the arbiter that runs."""
        return int(Path(f"/proc/{self.processes()[0]}/cmdline").read_bytes().split(b"\0")[1])

    def is_gone(self, limit_s: float) -> bool:
        return is_gone(f"{self.home}/bin/dynamiccl-arbiter", limit_s)


@pytest.fixture(name="job")
def job_fixture(home: Path) -> Iterator[Job]:
    job = Job(home)
    yield job
    for pid in job.processes():
        send(pid, signal.SIGKILL)  # it may have ended


FIRST = "RANK=0 $RUN printenv DYNAMICCL_ARBITER"


def test_the_first_rank_starts_it_and_the_others_find_it(job: Job) -> None:
    with job.launcher(FIRST) as (_, [own]):
        assert len(job.processes()) == 2
        assert own == f"127.0.0.1:{job.port}"
        assert 20000 <= job.port < 32000
        for rank in (1, 7):
            shown, said = job.of_rank(rank)
            assert (shown["DYNAMICCL_ARBITER"], said) == (own, "")
        # By another name, and on an address that answers beside those that do not.
        assert job.of_rank(3, MASTER_ADDR="localhost")[0]["DYNAMICCL_ARBITER"].endswith(
            f":{job.port}"
        )
        assert job.of_rank(3, MASTER_ADDR="::1")[0]["DYNAMICCL_ARBITER"] == f"[::1]:{job.port}"
    assert job.is_gone(1)


def test_it_goes_on_when_a_rank_is_started_again_and_ends_with_the_launcher(job: Job) -> None:
    with job.launcher(f"{FIRST}; echo first; {FIRST}; {FIRST}") as (launcher, [own, *again]):
        assert again == ["first", own, own]
        assert len(job.processes()) == 2
        before = job.processes()
        # The next attempt that Slurm makes is another job.
        assert job.of_rank(0, SLURM_RESTART_COUNT="1")[0]["DYNAMICCL_ARBITER"] != own
        assert len(job.processes()) == 4
        launcher.kill()
        launcher.wait()
        wait_until(lambda: not set(before) & set(job.processes()), "it is gone", 1)
        assert launcher.stderr is not None
        assert all("plugin.index" in line for line in launcher.stderr)


def test_none_that_is_about_to_end_is_taken_by_the_next_job_of_its_name(job: Job) -> None:
    """As `dynamiccl-run ...; dynamiccl-run ...` under one TORCHELASTIC_RUN_ID."""
    for _ in range(10):
        with job.launcher(FIRST):
            pass
        with job.launcher(FIRST) as (_, [own]):
            time.sleep(0.3)  # that of the job before looks each 0.2 s whether its processes live
            assert job.of_rank(1)[0].get("DYNAMICCL_ARBITER") == own
            assert own == f"127.0.0.1:{job.port}"
        assert job.is_gone(1)


def test_it_stays_while_the_first_rank_lives_without_a_launcher(job: Job) -> None:
    """As after `nohup dynamiccl-run ... &` and a logout."""
    rank = "(RANK=0 $RUN sleep 60 < /dev/null > /dev/null 2>&1 & echo $!)"
    with job.launcher(rank) as (_, [pid]):
        wait_until(lambda: len(job.processes()) == 2, "both of its processes")
    time.sleep(1.2)
    assert len(job.processes()) == 2
    os.kill(int(pid), signal.SIGKILL)
    assert job.is_gone(1)


WAITS_FOR_ALL = (
    "import os\nwhile True:\n try: os.wait()\n except ChildProcessError: break\nprint('waited')"
)


def test_a_rank_that_waits_for_all_its_children_ends(job: Job) -> None:
    script = f'RANK=0 $RUN python3 -c "{WAITS_FOR_ALL}"'
    with job.launcher(script) as (_, said):
        assert said == ["waited"]
        assert len(job.processes()) == 2


@pytest.mark.skipif(os.geteuid() != 0, reason="a process namespace needs root")
def test_as_process_1_of_a_container_it_keeps_the_arbiter_from_the_rank(job: Job) -> None:
    def run(script: str) -> "subprocess.Popen[str]":
        command = ["unshare", "--pid", "--fork", "--mount-proc", job.env["RUN"], "python3", "-c"]
        return subprocess.Popen(
            [*command, script], env={**job.env, "RANK": "0"}, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    process = run(f"{WAITS_FOR_ALL}\nimport sys; print(os.getpid(), input()); sys.exit(7)")
    said, _ = process.communicate("hello\n", timeout=30)
    waited, pid_and_line = said.splitlines()
    assert (waited, pid_and_line.split()[1], process.returncode) == ("waited", "hello", 7)
    assert pid_and_line.split()[0] != "1"
    assert job.is_gone(1)
    ends_well = (
        "import signal, sys; signal.signal(15, lambda *_: sys.exit(9)); print('on', flush=True)"
    )
    with run(f"{ends_well}\nsignal.pause()") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "on\n"
        [child] = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(child), signal.SIGTERM)
    assert process.returncode == 9


class Other(socketserver.BaseRequestHandler):
    """Something else that listens there."""

    how = ""

    def handle(self) -> None:
        if self.how == "says something else":
            self.request.sendall(b"x" * 500)
        if self.how != "accepts for the dead":
            self.request.recv(1 << 16, socket.MSG_WAITALL)  # until its peer goes


@pytest.mark.parametrize("how", ["silent", "accepts for the dead", "says something else"])
def test_an_accepted_connection_is_no_answer(how: str, job: Job) -> None:
    handler = type("Handler", (Other,), {"how": how})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        began = time.monotonic()
        place = f"127.0.0.1:{server.server_address[1]}"
        shown, said = job.of_rank(1, DYNAMICCL_ARBITER=place)
        assert "DYNAMICCL_ARBITER" not in shown
        assert f"{place}: where ranks need one" in said
        assert time.monotonic() - began < LIMIT_S + 8  # once; the job waits for nothing more
        # One that answers counts all the same.
        with job.launcher(FIRST) as (_, own):
            assert [job.of_rank(1, DYNAMICCL_ARBITER=place)[0]["DYNAMICCL_ARBITER"]] == own
        server.shutdown()


def test_where_none_is_found_the_rank_says_so_once_and_goes_on(job: Job) -> None:
    for rank, name, value, said in (
        (1, "MASTER_ADDR", "no-such-host.invalid", f"{NO_ANSWER} at no-such-host.invalid:"),
        (1, "MASTER_ADDR", "127.0.0.1", NO_ANSWER),  # nobody has started one
        (0, "MASTER_ADDR", "", "the host of rank 0 is not known here: set MASTER_ADDR"),
        (1, "DYNAMICCL_KEY_FILE", "/none", "under a key, and /none is none"),
    ):
        shown, told = job.of_rank(rank, **{name: value})
        assert told.count(said) == 1
        assert "DYNAMICCL_ARBITER" not in shown
        # A table on one host needs none.
        assert (shown["DYNAMICCL_WORD"], "DYNAMICCL_JOB" in shown) == ("1", True)


def test_of_three_ports_some_may_be_taken(job: Job) -> None:
    taken: list[socket.socket] = []
    try:
        for _ in range(3):
            with job.launcher(FIRST) as (_, [own]):
                assert own == f"127.0.0.1:{job.port}"
                shown, said = job.of_rank(1)
                assert (shown["DYNAMICCL_ARBITER"], said) == (own, "")
                port = job.port
            assert job.is_gone(5)
            taken.append(socket.create_server(("127.0.0.1", port)))
        shown, said = job.of_rank(0)
        assert "dynamiccl-arbiter: cannot listen: Address already in use" in said
        assert "DYNAMICCL_ARBITER" not in shown
        assert not job.processes()
    finally:
        for server in taken:
            server.close()


def test_that_of_another_job_or_key_is_none(job: Job, tmp_path: Path) -> None:
    key = tmp_path / "other-key"
    key.write_text("0" * 32)
    key.chmod(0o600)
    with job.launcher(FIRST) as (_, [own]):
        for env in ({"DYNAMICCL_JOB_ID": "other"}, {"DYNAMICCL_KEY_FILE": str(key)}):
            assert NO_ANSWER in job.of_rank(1, DYNAMICCL_ARBITER=own, **env)[1]


def by_hand(job: Job) -> Mapping[str, str]:
    """As under Ray: no launcher says anything but the user."""
    return {name: value for name, value in job.env.items() if name not in {
        "TORCHELASTIC_RUN_ID", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR"
    }} | {"DYNAMICCL_JOB_ID": job.env["TORCHELASTIC_RUN_ID"]}  # fmt: skip


def test_one_started_by_hand_is_taken(job: Job) -> None:
    job.env = dict(by_hand(job))
    with job.launcher(f"$RUN {job.home}/bin/dynamiccl-arbiter 0") as (_, [port]):
        shows = ("printenv", "DYNAMICCL_ARBITER", "DYNAMICCL_WORD")
        done = job(*shows, env={"DYNAMICCL_ARBITER": f"localhost:{port}"})
        address, word = done.stdout.split()
        assert address in {f"127.0.0.1:{port}", f"[::1]:{port}"}
        assert word == "1"
    assert job.is_gone(1)


def test_where_nvlink_may_join_hosts_any_job_has_one(job: Job, tmp_path: Path) -> None:
    """`dynamiccl-run python train.py`: nobody says on how many hosts that is."""
    job.env = dict(by_hand(job))
    build_fake_nvml(tmp_path)
    show = "$RUN printenv DYNAMICCL_WORD DYNAMICCL_ARBITER"
    with job.launcher(show, LD_LIBRARY_PATH=str(tmp_path), FAKE_NVML_CLUSTER="1") as (_, said):
        assert said == ["0", f"127.0.0.1:{job.port}"]
    assert job.is_gone(1)
    with job.launcher(show) as (_, said):
        assert said == ["1"]
        assert not job.processes()


def test_it_stays_where_its_standard_descriptors_are_closed(job: Job) -> None:
    with job.launcher("RANK=0 $RUN true <&- >&- 2>&-"):
        assert len(job.processes()) == 2
    assert job.is_gone(1)
