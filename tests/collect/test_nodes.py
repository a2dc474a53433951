"""Programs on nodes, what a node is, NCCL's nodes, and interference beside trials."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect import nodes as module
from dynamiccl.collect.grid import Interference, Setting, expand_hosts, host_list
from dynamiccl.collect.launchers import ContainerSettings, LauncherSettings
from dynamiccl.collect.nodes import Nodes, ask_nodes, disturb, exclusive
from dynamiccl.collect.on_node import FACTS_ARGV, ON_NODE, node_facts
from dynamiccl.datasets.schema import MEASUREMENTS
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective
from tests.collect import sysfs
from tests.collect.live_processes import PATIENCE_S, await_true, children, cpu_seconds, is_running
from tests.fakes.nccl_tests.install import install_stand_in
from tests.fakes.nvml.build import fake_nvml_env

LOCAL = Nodes(LauncherSettings())


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_program_that_fails_or_cannot_be_started_is_told() -> None:
    assert LOCAL.ask(python("print('one'); print('two')"), 1) == ["one", "two"]
    code = "import sys; [print(i, flush=True) for i in range(9)]; sys.exit('no such device')"
    with pytest.raises(MachineError, match=r"ended with status 1: 7 \| 8 \| no such device"):
        LOCAL.ask(python(code), 1)
    with pytest.raises(MachineError, match="status 1: no output"):
        LOCAL.ask(["false"], 1)
    with pytest.raises(MachineError, match="cannot start 'no-such-program'"):
        LOCAL.ask(["no-such-program"], 1)
    with pytest.raises(InvalidSweep, match="take launcher mpirun, srun or sbatch"):
        LOCAL.ask(["true"], 2)


PARENT = """
import subprocess, sys
child = subprocess.Popen([sys.executable, "-c", "import time; print('up', flush=True); \
time.sleep(600)"])
child.wait()
"""


def test_started_program_ends_with_its_children() -> None:
    said: list[str] = []
    with LOCAL.start(python(PARENT), 1, said.append) as program:
        assert program.wait_for(lambda: said == ["up"], 20)
        [child] = children(program.process.pid)
    assert program.process.returncode is not None
    await_true(lambda: not is_running(child))
    assert program.last_words == "up"


def test_our_programs_run_beside_the_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = tmp_path / "srun"
    fake.write_text("#!/bin/sh\nprintf '%s\\n' \"$@\"\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    container = ContainerSettings(runtime="pyxis", image="nccl.sqsh")
    prefix, extra = ("numactl", "-l"), ("--mpi=pmix",)
    settings = LauncherSettings(kind="srun", extra_args=extra, prefix=prefix, container=container)
    srun = Nodes(settings)
    words = srun.ask(["asks", "--what", "x y"], 3)
    assert not srun.one_process
    assert words[-3:] == ["asks", "--what", "x y"]
    assert {"--overlap", "--mpi=pmix", "--cpu-bind=none"} <= set(words)
    assert not [word for word in words if "container" in word or word == "numactl"]
    assert "-N 3 -n 3" in " ".join(words)
    started: list[str] = []
    with srun.start(["traffic"], 2, started.append, ranks_per_node=4) as program:
        program.wait_for(lambda: False, 20)
    assert "-N 2 -n 8" in " ".join(started)


NODE: dict[str, Any] = {
    "nvml_error": None,
    "num_gpus": 8,
    "gpu": "FAKE H100",
    "driver_version": "999.10",
    "mig": False,
    "cpu_vendor": "intel",
    "nic_kind": "infiniband",
}
FACTS = {name: NODE[name] for name in NODE if name != "nvml_error"}


class Answers(Nodes):
    """Nodes that answer what a test says."""

    def __init__(self, *lines: str | dict[str, Any]) -> None:
        super().__init__(LauncherSettings())
        self._lines = [line if isinstance(line, str) else json.dumps(line) for line in lines]

    def ask(self, argv: object, num_nodes: int) -> list[str]:  # noqa: ARG002
        return self._lines


def test_nodes_are_asked_and_differences_told(caplog: pytest.LogCaptureFixture) -> None:
    assert ask_nodes(Answers("srun: step", f"0: {json.dumps(NODE)}", "", NODE), 2, {}) == FACTS
    assert caplog.text == ""
    assert ask_nodes(Answers("{torn", "{}", "7", NODE), 3, {}) == FACTS
    assert "only 1 of 3 nodes reported their facts" in caplog.text
    assert ask_nodes(Answers(), 1, {}) == {}
    other = NODE | {"driver_version": "1.0", "nic_kind": None, "num_gpus": 4}
    found = ask_nodes(Answers(NODE, other), 2, {})
    assert found.keys() == FACTS.keys() - {"driver_version", "nic_kind", "num_gpus"}
    assert "the nodes differ in driver_version, nic_kind, num_gpus: not recorded" in caplog.text
    # MIG on one node is MIG.
    for one, two, both in ((False, True, True), (None, True, True), (False, None, None)):
        found = ask_nodes(Answers(NODE | {"mig": one}, NODE | {"mig": two}), 2, {})
        assert found.get("mig") is both


def test_slurm_says_whether_the_nodes_are_ours_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def asked() -> dict[str, Any]:
        return ask_nodes(Answers(NODE), 1, {"SLURM_JOB_ID": "42"})

    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    fake = tmp_path / "scontrol"
    for word, alone in (("NO", True), ("EXCLUSIVE", True), ("OK", False), ("USER", False)):
        line = f"JobId=42 JobName=x\n   OverSubscribe={word} Contiguous=0 Licenses=(null)"
        fake.write_text(f'#!/bin/sh\n[ "$*" = "show job 42" ] && echo "{line}"\n')
        fake.chmod(0o755)
        caplog.clear()
        assert asked() | {"exclusive_node": alone, "job_id": "42"} == asked()
        assert ("the nodes are shared with other jobs" in caplog.text) != alone
    assert exclusive("43") is None
    fake.unlink()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "exclusive_node" not in asked()


def test_what_runs_on_nodes_imports_no_library() -> None:
    """It starts on each node beside trials, on thousands of them from one file system."""
    heavy = {"numpy", "polars", "pyarrow", "pydantic", "typer"}
    code = f"import sys, dynamiccl.collect.on_node; print({heavy} & sys.modules.keys())"
    assert subprocess.check_output(python(code)) == b"set()\n"


def facts_by(folder: Path, **settings: object) -> dict[str, Any]:
    """The facts that a process of its own prints, with the fake NVML."""
    env = fake_nvml_env(folder, **settings)
    done = subprocess.run(FACTS_ARGV, env=env, capture_output=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_nvml_says_what_the_gpus_are(fake_nvml: Path) -> None:
    facts = facts_by(fake_nvml, gpus=8)
    wanted = {
        "nvml_error": None,
        "num_gpus": 8,
        "gpu": "FAKE H100",
        "driver_version": "999.10.fake",
        "compute_capability": 9.0,
        "nvlink_generation": 4,
        "nvlinks_per_gpu": 18,
        "nvswitch": True,
        "mig": False,
    }
    assert facts == facts | wanted
    assert facts.keys() - {"nvml_error", "num_gpus"} <= set(MEASUREMENTS.names)
    # As a GPU without NVLink answers.
    denied = [f"nvmlDeviceGet{name}" for name in ("MigMode=4", "Name=4", "NvLinkState=3")]
    facts = facts_by(fake_nvml, deny=",".join(denied))
    assert (facts["mig"], facts["gpu"]) == (None, None)
    links = (facts["nvlink_generation"], facts["nvlinks_per_gpu"], facts["nvswitch"])
    assert links == (0, 0, False)
    facts = facts_by(fake_nvml, deny="nvmlInitWithFlags=4")
    assert "Insufficient Permissions" in facts["nvml_error"]
    assert facts["num_gpus"] is None
    assert "gpu" not in facts


def test_node_without_nvml_says_what_to_install(tmp_path: Path) -> None:
    for name, state in (("mlx5_0", "4: ACTIVE"), ("mlx5_1", "4: ACTIVE"), ("mlx5_2", "1: DOWN")):
        sysfs.infiniband(tmp_path, name, state=state)
    (tmp_path / "cpuinfo").write_text("processor\t: 0\nvendor_id\t: GenuineIntel\n")
    code = (
        "import sys; sys.modules['pynvml'] = None; from pathlib import Path; "
        "import json; from dynamiccl.collect.on_node import node_facts; "
        f"where = Path({str(tmp_path)!r}); print(json.dumps(node_facts(where, where)))"
    )
    assert json.loads(subprocess.check_output(python(code))) == {
        "nvml_error": "no package nvidia-ml-py; pip install '.[telemetry]'",
        "num_gpus": None,
        "cpu_vendor": "intel",
        "node_fingerprint": None,
        "nic_kind": "infiniband",
        "nic_gbits_per_s": 400.0,
        "nics_per_node": 2,
    }


def nics(root: Path) -> tuple[Any, ...]:
    facts = node_facts(root, root)
    return facts["nic_kind"], facts["nic_gbits_per_s"], facts["nics_per_node"]


def test_kinds_of_nics_are_told_apart(tmp_path: Path) -> None:
    sysfs.infiniband(tmp_path, "mlx5_0", state="1: DOWN")
    assert nics(tmp_path) == (None, None, None)
    for name in ("lo", "veth0", "veth1"):
        sysfs.ethernet(tmp_path, name)
    assert nics(tmp_path) == ("socket", None, 2)
    for name, speed in (("eth0", 25000), ("eth1", 100000), ("eth2", -1)):
        sysfs.ethernet(tmp_path, name, speed=speed, hardware=True)
    assert nics(tmp_path) == ("socket", 100.0, 1)
    # Sockets are the NICs of a node without RDMA alone.
    sysfs.efa(tmp_path, "rdmap16s27")
    assert nics(tmp_path) == ("efa", 100.0, 1)
    sysfs.infiniband(tmp_path, "mlx5_1", layer="Ethernet")
    assert nics(tmp_path) == ("roce", 400.0, 1)


def test_runs_of_numbers_are_a_range() -> None:
    for hosts, text in (
        (["n1", "n2", "n3"], "n[1-3]"),
        (["n9", "n10"], "n9,n10"),
        (["n09", "n10", "n12"], "n[09-10],n12"),
        (["a1.x", "a2.x", "a3.y"], "a[1-2].x,a3.y"),
        (["login", "login"], "login"),
        (["b2", "b1"], "b2,b1"),
        ([], ""),
    ):
        assert host_list(hosts) == text
        assert expand_hosts(text) == list(dict.fromkeys(hosts))


NOTHING = "/no/such/program"


def setting(kind: str = "none", level: float = 0.0, ranks: int = 2, nodes: int = 1) -> Setting:
    shape = nodes, ranks, nodes, ranks
    return Setting(Collective.AllReduce, *shape, interference=Interference(kind, level))


class Started(Nodes):
    """Local nodes that tell what was started; with `code`, that Python program instead."""

    def __init__(self, code: str = "") -> None:
        super().__init__(LauncherSettings())
        self.code = code
        self.pids: list[int] = []
        self.argv: list[str] = []

    @contextmanager
    def start(self, argv, num_nodes, hear, **more):  # type: ignore[no-untyped-def]
        self.argv = list(argv)
        if self.code:
            argv, num_nodes, more = [sys.executable, "-u", "-c", self.code], 1, {}
        with super().start(argv, num_nodes, hear, **more) as program:
            self.pids.append(program.process.pid)
            yield program

    def is_running(self) -> bool:
        return is_running(self.pids[0])


def test_stress_ends_with_the_launch_and_is_missed() -> None:
    nodes = Started()
    stress = disturb(nodes, None, setting("cpu", 0.1), NOTHING)
    with suppress(ZeroDivisionError), stress as lost:
        assert nodes.is_running()
        assert lost() is None
        raise ZeroDivisionError
    assert not nodes.is_running()
    with disturb(nodes, None, setting("cpu", 0.1), NOTHING) as lost:
        os.kill(nodes.pids[-1], 9)
        await_true(lambda: lost() is not None)
        assert str(lost()).startswith("interference 'cpu' ended with status -9")


@pytest.mark.parametrize(("level", "channels"), [(0.5, 16), (0.01, 1)])
def test_traffic_runs_on_the_gpus_that_are_left_free(
    level: float, channels: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAKE_SECONDS_PER_ROW", "0.01")
    binary = install_stand_in(tmp_path) / "all_reduce_perf"
    nodes = Started()
    with disturb(nodes, 8, setting("traffic", level), str(binary)) as lost:
        assert lost() is None
        assert nodes.is_running()
    assert not nodes.is_running()
    # One process drives the six GPUs behind the trial's two.
    assert nodes.argv == [
        *("env", "-u", "NCCL_MIN_CTAS", f"NCCL_MAX_CTAS={channels}", "NCCL_TESTS_DEVICE=2"),
        *(str(binary), "-b", "64M", "-e", "64M", "-g", "6"),
        *("-n", "100", "-w", "5", "-c", "0", "-N", "0"),
    ]


def test_traffic_needs_a_gpu_to_spare() -> None:
    too_few = "of 2; take groups with fewer ranks_per_node"
    for num_gpus, said in ((None, "of nobody knows how many"), (2, too_few)):
        traffic = disturb(LOCAL, num_gpus, setting("traffic", 0.5), NOTHING)
        with pytest.raises(InvalidSweep, match=said), traffic:
            pass


def test_one_that_does_not_get_ready_is_ended_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    ends, loads = (
        "print('no cores'); raise SystemExit(4)",
        "import time; print('loads'); time.sleep(60)",
    )
    late = r"not ready after 1 s \(0 of 1 .* loads"
    for code, ready_s, said in ((ends, 60, "ended with status 4; .*no cores"), (loads, 1, late)):
        monkeypatch.setattr(module, "READY_S", ready_s)
        nodes = Started(code)
        started = disturb(nodes, None, setting("cpu", 0.5), NOTHING)
        with pytest.raises(MachineError, match=f"'cpu' .*{said}"), started:
            raise AssertionError
        assert not nodes.is_running()


@contextmanager
def disturbing(level: str) -> Iterator[subprocess.Popen[str]]:
    """A disturbance on one core (others share this machine), busy, surely gone afterwards."""
    command = ["taskset", "-c", str(min(os.sched_getaffinity(0))), *ON_NODE, "busy", level]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as child:
        try:
            assert child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            yield child
        finally:
            child.kill()


def test_cpu_stress_takes_its_share_of_a_core() -> None:
    with disturbing("0.5") as child:
        (worker,) = children(child.pid)
        used, began = cpu_seconds(worker), time.monotonic()
        time.sleep(0.5)
        assert 0.0 < cpu_seconds(worker) - used < 0.6 * (time.monotonic() - began)


def test_it_ends_by_a_signal_and_leaves_nobody() -> None:
    """As a sampler does, also with its starter (test_watch.py)."""
    with disturbing("0.1") as ended, disturbing("0.1") as killed:
        workers = [pid for child in (ended, killed) for pid in children(child.pid)]
        assert len(workers) == 2
        ended.send_signal(signal.SIGTERM)
        killed.send_signal(signal.SIGKILL)
        assert [child.wait(PATIENCE_S) for child in (ended, killed)] == [0, -signal.SIGKILL]
        await_true(lambda: not any(map(is_running, workers)))
