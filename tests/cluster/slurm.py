"""A Slurm cluster on this machine: real daemons, four nodes in network namespaces.

Every node is a network and UTS namespace on a bridge, so that it has a hostname and an address; the
namespaces are held by processes and vanish with them, and nothing of two runs can collide. All
daemons are children of the test and die with it (PR_SET_PDEATHSIG).

    slurm.run(["srun", "-N4", "hostname"])            a client on the control node, to its end
    subprocess.Popen(slurm.wrap(["salloc", ...]), env=slurm.environ())       the same, by hand
    slurm.clients                                     a folder for PATH: sbatch, squeue, ...
"""

import os
import shlex
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

NODES = 4
CPUS = 4
PROGRAMS = (
    *("slurmctld", "slurmd", "munged", "srun", "sbatch"),
    *("ip", "nsenter", "setpriv", "unshare"),
)


def missing() -> str | None:
    """Why no cluster can be started here, or None."""
    if os.geteuid() != 0:
        return "Slurm's daemons need root here"
    absent = [name for name in PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"not installed: {', '.join(absent)}"
    tried = subprocess.run(["unshare", "--net", "--uts", "true"], capture_output=True, check=False)
    return "no namespaces may be made here" if tried.returncode else None


def wait_until(condition: Callable[[], bool], what: str, seconds: float = 20.0) -> None:
    """Poll a condition; fails after so many seconds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"not in {seconds:g} s: {what}"
        time.sleep(0.05)


class Slurm:
    """The cluster. `start` before use, `stop` after it."""

    def __init__(self) -> None:
        # Short, since the path of a socket has at most 107 characters.
        self.root = Path(tempfile.mkdtemp(prefix="dcs-", dir="/tmp"))
        self.nodes = [f"n{i}" for i in range(1, NODES + 1)]
        #: A folder to put in front of PATH: clients that reach the cluster from outside.
        self.clients = self.root / "clients"
        self._holders: dict[str, int] = {}
        self._children: list[subprocess.Popen[bytes]] = []

    @property
    def conf(self) -> Path:
        return self.root / "slurm.conf"

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables for clients.

        Open MPI keeps a folder for each host name under TMPDIR, and removes it with its last job:
        nodes of two clusters have the same names, and one's end would break the other's start.
        """
        return {"SLURM_CONF": str(self.conf), "TMPDIR": str(self.root / "tmp")}

    def environ(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        """Our environment, without any other Slurm's variables, for a client."""
        kept = {n: v for n, v in os.environ.items() if not n.startswith(("SLURM_", "SBATCH_"))}
        return {**kept, **self.variables, **(env or {})}

    def wrap(self, argv: Sequence[str], place: str = "ctl") -> list[str]:
        """The command as it is run on the control node, or on the node `place`."""
        # Entered by process, /sys stays as it is; `ip netns exec` would mount another one.
        return ["nsenter", f"--target={self._holders[place]}", "--net", "--uts", "--", *argv]

    def run(
        self,
        argv: Sequence[str],
        env: Mapping[str, str] | None = None,
        *,
        check: bool = True,
        timeout_s: float = 60.0,
    ) -> subprocess.CompletedProcess[str]:
        """Run a client on the control node to its end, with additions to the environment."""
        done = subprocess.run(
            self.wrap(argv),
            env=self.environ(env),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        assert not check or done.returncode == 0, f"{shlex.join(argv)}: {done.stdout}{done.stderr}"
        return done

    def state(self, job: str) -> str:
        """State of a job in one word; empty when Slurm has forgotten it."""
        argv = ["squeue", f"--jobs={job}", "--noheader", "--states=all", "--format=%T"]
        return " ".join(self.run(argv, check=False).stdout.split())

    def set_node(self, node: str, state: str) -> None:
        """Set a node `down` or `resume` it."""
        self.run(["scontrol", "update", f"nodename={node}", f"state={state}", "reason=test"])

    def all_idle(self) -> bool:
        states = self.run(["sinfo", "-h", "-N", "-o", "%t"], check=False).stdout.split()
        return states == ["idle"] * NODES

    def clear(self) -> None:
        """Reset: no job, every node up."""
        self.run(["scancel", "--user=root"])
        for line in self.run(["sinfo", "-h", "-N", "-o", "%N %t"]).stdout.splitlines():
            node, state = line.split()
            if state.startswith(("down", "drain")):
                self.set_node(node, "resume")
        wait_until(self.all_idle, "all nodes idle again")

    def processes_with(self, marker: str) -> list[int]:
        """Living processes on the nodes whose command line holds a word."""
        return [pid for pid in self._processes() if marker in _command_line(pid)]

    def start(self) -> None:
        for name in ("state", "log", "munge", "clients"):
            (self.root / name).mkdir()
        for node in self.nodes:
            (self.root / "spool" / node).mkdir(parents=True)
            (self.root / "tmp" / node).mkdir(parents=True)
        self.root.chmod(0o755)
        self._build_network()
        self._write_configuration()
        self._start_munge()
        self._spawn(self.wrap(["slurmctld", "-c", "-D"]))
        for node in self.nodes:
            self._spawn(self.wrap(["slurmd", "-D", "-N", node], node))
        self._write_clients()
        wait_until(self.all_idle, "all nodes idle")

    def stop(self) -> None:
        """End all jobs, all daemons, and whatever is left of them."""
        self.run(["scancel", "--user=root"], check=False)
        daemons = [child for child in self._children if child.pid not in self._holders.values()]
        for child in [*daemons, *self._children]:
            child.terminate()
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
        for pid in self._processes():
            os.kill(pid, signal.SIGKILL)
        shutil.rmtree(self.root)

    def _processes(self) -> list[int]:
        """Processes that belong to this cluster, by the configuration in their environment."""
        mark, found = f"SLURM_CONF={self.conf}".encode(), []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                # Ended, or not to be looked at, hence not ours.
                with suppress(FileNotFoundError, ProcessLookupError, PermissionError):
                    if mark in (entry / "environ").read_bytes().split(b"\0"):
                        found.append(int(entry.name))
        return found

    def _spawn(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        with (self.root / "daemons.log").open("ab") as file:
            child = subprocess.Popen(
                ["setpriv", "--pdeathsig=KILL", "--", *argv],
                env=self.environ(),
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        self._children.append(child)
        return child

    def _start_munge(self) -> None:
        folder = self.root / "munge"
        key = folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o400)
        places = {
            "key-file": key,
            "socket": folder / "munge.sock",
            "pid-file": folder / "munged.pid",
            "log-file": folder / "munged.log",
            "seed-file": folder / "seed",
        }
        options = [f"--{name}={path}" for name, path in places.items()]
        # With --force munged takes a folder in /tmp for its socket.
        self._spawn(["munged", "--foreground", "--force", "--num-threads=10", *options])
        wait_until((folder / "munge.sock").exists, "munged listens")

    def _build_network(self) -> None:
        for place in ("switch", "ctl", *self.nodes):
            script = f"hostname {place}; echo > {self.root}/{place}.up; exec sleep infinity"
            holder = self._spawn(["unshare", "--net", "--uts", "sh", "-c", script])
            self._holders[place] = holder.pid
        for place in self._holders:
            wait_until((self.root / f"{place}.up").exists, f"namespace of {place}")
        self._ip("switch", "link add br0 type bridge")
        self._ip("switch", "link set br0 up")
        for number, place in enumerate(["ctl", *self.nodes]):
            peer = f"type veth peer name eth0 netns {self._holders[place]}"
            self._ip("switch", f"link add p{number} {peer}")
            self._ip("switch", f"link set p{number} master br0 up")
            self._ip(place, f"addr add {self._address(number)}/24 dev eth0")
            self._ip(place, "link set eth0 up")
            self._ip(place, "link set lo up")

    def _ip(self, place: str, words: str) -> None:
        argv = self.wrap(["ip", *words.split()], place)
        subprocess.run(argv, check=True, capture_output=True)

    def _address(self, number: int) -> str:
        return f"10.78.0.{number or 100}"

    def _write_configuration(self) -> None:
        lines = [f"SlurmctldHost=ctl({self._address(0)})"]
        for number, node in enumerate(self.nodes, 1):
            where = f"NodeName={node} NodeAddr={self._address(number)} CPUs={CPUS}"
            lines.append(f"{where} RealMemory=2000 State=UNKNOWN")
        text = _CONFIGURATION.format(root=self.root) + "\n".join([*lines, ""])
        self.conf.write_text(text, encoding="utf-8")

    def _write_clients(self) -> None:
        for name in ("sbatch", "squeue", "scancel", "scontrol"):
            path = self.clients / name
            real = shlex.join(self.wrap([str(shutil.which(name))]))
            path.write_text(
                f'#!/bin/sh\nSLURM_CONF={self.conf} exec {real} "$@"\n', encoding="utf-8"
            )
            path.chmod(0o755)


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    except (FileNotFoundError, ProcessLookupError):
        return ""


#: What matters here: TmpFS with %n, or PMIx refuses several nodes of one machine; the credential's
#: life, which a requeued job waits for (slurm.conf(5), AuthInfo: 120 s by default); short waits of
#: the scheduler. There is no accounting.
_CONFIGURATION = """\
ClusterName=ci
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={root}/munge/munge.sock,cred_expire=5
MpiDefault=none
SlurmctldPidFile={root}/slurmctld.pid
SlurmctldLogFile={root}/log/slurmctld.log
SlurmdPidFile={root}/slurmd.%n.pid
SlurmdLogFile={root}/log/slurmd.%n.log
SlurmdSpoolDir={root}/spool/%n
StateSaveLocation={root}/state
TmpFS={root}/tmp/%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
ReturnToService=2
SlurmdTimeout=10
KillWait=2
MinJobAge=300
SchedulerParameters=batch_sched_delay=0,sched_interval=1,bf_interval=1
SlurmdParameters=config_overrides
PartitionName=main Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
