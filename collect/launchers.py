"""Launchers: what to start on this machine for a program that runs as ranks on nodes; running it.

local   the program itself: one process that drives all GPUs (`-g N` of nccl-tests)
mpirun  Open MPI 4 and 5. It forwards output in chunks, not lines, so two ranks may share a line:
        nccl-tests prints its tables from one rank, and NCCL's logs must go to NCCL_DEBUG_FILE
srun    a step of the current Slurm allocation, its output line by line: with --unbuffered lines of
        several ranks mix. Variables go through srun's own environment: `--export=NAME=VALUE` cuts
        values at commas. For Open MPI, put `--mpi=pmix` into extra_args
sbatch  srun, inside the batch job that runs the sweep (`batch.py`)

Containers: Pyxis is options of srun (github.com/NVIDIA/pyxis, wiki "Usage"), Apptainer a program
before every rank (apptainer.org, user guide: "Bind Paths and Mounts", "Environment and Metadata").

A program runs in a session of its own, so that a terminal's Ctrl-C reaches us only (`Interrupt`).
To end it, a signal goes to the leader's process group first: srun and mpirun then end ranks on
other nodes. What is left is killed by session: mpirun gives each local rank a group of its own.
"""

import hashlib
import logging
import os
import posixpath
import select
import shlex
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import IO, Any, Final, Literal, Self

from pydantic import Field

from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.simulator.toml_table import Table

_log = logging.getLogger(__name__)

LauncherKind = Literal["local", "mpirun", "srun", "sbatch"]


class ContainerSettings(Table):
    """The container of every rank: Pyxis is options of srun, Apptainer a program before each."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    #: `host:container[:options]`.
    mounts: tuple[str, ...] = ()


class LauncherSettings(Table):
    """The `[launcher]` table; all options are passed through as written."""

    kind: LauncherKind = "local"
    extra_args: tuple[str, ...] = ()
    #: Words before the benchmark on every rank, e.g. numactl.
    prefix: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    #: Lines for the head of the batch script, e.g. "--time=02:00:00".
    sbatch_header: tuple[str, ...] = ()
    container: ContainerSettings | None = None

    @property
    def is_distributed(self) -> bool:
        """Whether ranks are processes of their own (MPI, and `-g 1`)."""
        return self.kind != "local"

    @property
    def is_slurm(self) -> bool:
        """Whether srun starts the ranks."""
        return self.kind in {"srun", "sbatch"}

    @property
    def grace_s(self) -> float:
        """Seconds to end ranks: Slurm kills after 30 (KillWait), srun waits 2 more."""
        return 40.0 if self.is_slurm else 5.0


@dataclass(frozen=True, slots=True)
class Ranks:
    """A program as `ranks_per_node` processes on each of `num_nodes`."""

    #: As inside the container.
    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict)
    num_nodes: int = 1
    ranks_per_node: int = 1
    unset: tuple[str, ...] = ()
    #: Beside another step of the same allocation.
    overlap: bool = False


#: Arguments, and what must be set where they start.
_Command = tuple[tuple[str, ...], dict[str, str]]


def _local(ranks: Ranks, settings: LauncherSettings) -> _Command:
    if settings.extra_args:
        raise InvalidSweep(
            f"launcher 'local' takes no extra_args ({' '.join(settings.extra_args)}); words before "
            "the benchmark go into launcher.prefix"
        )
    return _in_container(ranks, settings)


def _mpirun(ranks: Ranks, settings: LauncherSettings) -> _Command:
    rank, env = _in_container(ranks, settings)
    binding = {"--bind-to", "-bind-to", "--cpu-set", "--rankfile", "-rf", "--cpu-list"}
    argv = (
        "mpirun",
        # Open MPI refuses root without it.
        *(["--allow-run-as-root"] if os.getuid() == 0 else []),
        *("-np", str(ranks.num_nodes * ranks.ranks_per_node)),
        *("--map-by", f"ppr:{ranks.ranks_per_node}:node"),
        # Open MPI 4 binds up to two ranks to a core each, for NCCL's proxy threads to share.
        *([] if binding & set(settings.extra_args) else ["--bind-to", "none"]),
        *_each("-x", [f"{name}={env[name]}" for name in sorted(env)]),
        *settings.extra_args,
        *rank,
    )
    # In an allocation mpirun's daemons are a step of srun, which would wait for others.
    beside = {"SLURM_OVERLAP": "1"} if ranks.overlap else {}
    return argv, {**env, **beside}


def _srun(ranks: Ranks, settings: LauncherSettings) -> _Command:
    rank, env = _in_container(ranks, settings)
    container, options = settings.container, list[str]()
    if container is not None and container.runtime == "pyxis":
        # By name an image is imported once on a node.
        digest = hashlib.sha256(container.image.encode()).hexdigest()[:8]
        options = [f"--container-image={container.image}", f"--container-name=dynamiccl-{digest}"]
        if container.mounts:
            options.append(f"--container-mounts={','.join(container.mounts)}")
        if env:
            # Else a variable keeps the image's value.
            options.append(f"--container-env={','.join(sorted(env))}")
    argv = (
        "srun",
        *("-N", str(ranks.num_nodes), "-n", str(ranks.num_nodes * ranks.ranks_per_node)),
        f"--ntasks-per-node={ranks.ranks_per_node}",
        # Else a job submitted with --export=NONE starts steps without variables.
        "--export=ALL",
        # Else the others wait for a dead rank.
        "--kill-on-bad-exit=1",
        *(["--overlap"] if ranks.overlap else []),
        *options,
        *settings.extra_args,
        *rank,
    )
    return argv, env


_COMMANDS: Final = {"local": _local, "mpirun": _mpirun, "srun": _srun, "sbatch": _srun}


def command(ranks: Ranks, settings: LauncherSettings) -> tuple[str, ...]:
    """What to start on this machine. Raises InvalidSweep where the launcher cannot."""
    container = settings.container
    if ranks.num_nodes > 1 and not settings.is_distributed:
        raise InvalidSweep(
            f"launcher '{settings.kind}' starts one process on this machine, but a group has "
            f"num_nodes = {ranks.num_nodes}; take launcher mpirun, srun or sbatch, or groups of "
            "one node"
        )
    if container is not None and container.runtime == "pyxis" and not settings.is_slurm:
        raise InvalidSweep(
            f"container runtime 'pyxis' is a plugin of srun and does not work with launcher "
            f"'{settings.kind}'; take launcher srun or sbatch, or runtime apptainer"
        )
    argv, env = _COMMANDS[settings.kind](ranks, settings)
    changes = [f"{name}={value}" for name, value in sorted(env.items())]
    return ("env", *changes, *argv) if changes else argv


def map_into_container(path: str, container: ContainerSettings | None) -> str:
    """A host's path inside the container, by the innermost mount. Raises InvalidSweep without."""
    if container is None:
        return path
    host = PurePosixPath(posixpath.normpath(path))
    ends = [(*mount.split(":"), "")[:2] for mount in container.mounts]
    places = [(posixpath.normpath(source), target or source) for source, target in ends]
    fitting = [(source, target) for source, target in places if host.is_relative_to(source)]
    if not fitting:
        mounts = ", ".join(container.mounts) or "none"
        raise InvalidSweep(
            f"{path} cannot be seen inside the container '{container.image}' (mounts: {mounts}); "
            f'add "{host.parent}:{host.parent}" to launcher.container.mounts'
        )
    source, target = max(fitting, key=lambda place: len(place[0]))
    return posixpath.normpath(posixpath.join(target, host.relative_to(source)))


def _in_container(ranks: Ranks, settings: LauncherSettings) -> _Command:
    """What a rank runs, dropping variables itself (its node's, an image's), and what to set."""
    env = {**settings.env, **ranks.env}
    env = {name: value for name, value in env.items() if name not in ranks.unset}
    container = settings.container
    drop = ("env", *_each("-u", ranks.unset)) if ranks.unset else ()
    argv = (*settings.prefix, *ranks.argv)
    if "=" in argv[0]:
        raise InvalidSweep(f"'{argv[0]}' would be taken for a variable: give its path no '='")
    argv = (*drop, *argv)
    if container is None or container.runtime == "pyxis":
        return argv, env
    # These win over the image's, PATH too (user guide); --env would cut values at commas.
    inside = {f"APPTAINERENV_{name}": value for name, value in env.items()}
    binds = _each("--bind", container.mounts)
    return ("apptainer", "exec", "--nv", *binds, container.image, *argv), {**env, **inside}


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


_LOOK_S: Final = 0.02
#: For output after the leader's end, from a child that holds the pipe.
_LINGER_S: Final = 0.5
#: Longer lines are handed on in pieces: a runaway log must not fill our memory.
MAX_LINE_BYTES: Final = 1 << 20


class Interrupt:
    """Handles the signals that end a run, in the main thread only.

    The first sets `requested`: finish the running trial. SIGUSR1 and SIGTERM, which Slurm sends
    before a time limit or preemption, do no more. A further Ctrl-C sets `forced`: `check` raises,
    and a running process is killed. One more raises KeyboardInterrupt at once.
    """

    def __init__(self) -> None:
        self.requested = self.forced = False
        self.cause = ""
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            self._before[number] = signal.signal(number, self._received)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise KeyboardInterrupt after a second Ctrl-C."""
        if self.forced:
            raise KeyboardInterrupt

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.forced and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:
            # A batch job gets SIGUSR1 and SIGTERM, at times twice: only a person insists.
            self.forced |= number == signal.SIGINT
            return
        self.requested = True
        self.cause = signal.Signals(number).name
        _log.warning("%s: stopping after the running trial; Ctrl-C to stop at once", self.cause)


def run_process(
    argv: Sequence[str],
    patience_s: Callable[[], float],
    grace_s: float,
    on_line: Callable[[str, float], bool],
    interrupt: Interrupt,
) -> int | None:
    """Run a program to its end, or end it with all its children when it hangs.

    The exit status is negative for a signal, None for a hang. `patience_s`, asked at the start and
    after progress, is how long the next may take; `grace_s` lie between SIGTERM and SIGKILL.
    `on_line` takes a line and its Unix time, and says whether it is progress. Raises MachineError
    when it cannot start, KeyboardInterrupt on a second Ctrl-C.
    """
    leader = start_session(argv, subprocess.PIPE)
    output = _Output(leader, on_line)
    is_hung, deadline = False, time.monotonic() + patience_s()
    # Not reaped, its number stays its own until all of its session has ended.
    look = (os.P_PID, leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    try:
        while not is_hung and os.waitid(*look) is None:
            if output.hand_on():
                deadline = time.monotonic() + patience_s()
            interrupt.check()
            is_hung = time.monotonic() >= deadline
        if not is_hung:
            output.hand_on(_LINGER_S)
        end_session(leader, grace_s, meanwhile=output.hand_on)
        output.hand_on(_LINGER_S)
    except BaseException:
        end_session(leader, grace_s)
        raise
    finally:
        output.pipe.close()
    return None if is_hung else leader.returncode


class _Output:
    """A program's lines; a process that it left behind may hold the pipe open."""

    def __init__(
        self, leader: subprocess.Popen[bytes], on_line: Callable[[str, float], bool]
    ) -> None:
        assert leader.stdout is not None
        self.pipe = leader.stdout
        self._on_line = on_line
        self._rest = b""

    def hand_on(self, wait_s: float = _LOOK_S) -> bool:
        """Hand on lines for so many seconds; whether one was progress."""
        progressed, until = False, time.monotonic() + wait_s
        while (left_s := until - time.monotonic()) > 0:
            if not select.select([self.pipe], [], [], left_s)[0]:
                break
            read = os.read(self.pipe.fileno(), MAX_LINE_BYTES)
            *whole, self._rest = (self._rest + read).split(b"\n")
            if self._rest and (not read or len(self._rest) > MAX_LINE_BYTES):
                whole, self._rest = [*whole, self._rest], b""
            for raw in whole:
                # srun --unbuffered: a pseudo-terminal adds a carriage return.
                text = raw.removesuffix(b"\r").decode(errors="replace")
                progressed |= self._on_line(text, time.time())
            if not read:
                time.sleep(min(left_s, _LOOK_S))
                break
        return progressed


def start_session(
    argv: Sequence[str], output: int | IO[bytes], *, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a command as leader of a session, stderr in `output` too. Raises MachineError."""
    try:
        return subprocess.Popen(
            argv, stdin=stdin, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    except OSError as error:
        raise MachineError(
            f"cannot start '{argv[0]}': {error.strerror}; install it, or correct its path (whole "
            f"command: {shlex.join(argv)})"
        ) from error


def end_session(
    leader: subprocess.Popen[bytes], grace_s: float, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """SIGTERM to the group, after `grace_s` seconds SIGKILL to the session; reaps the leader."""
    if leader.returncode is not None:
        return  # reaped: its number may be somebody else's by now
    try:
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while _members(leader.pid) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(_LOOK_S)
    finally:
        # Again, since processes may start others meanwhile; the kernel has 5 s to end them.
        deadline = time.monotonic() + 5.0
        while (members := _members(leader.pid)) and time.monotonic() < deadline:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_LOOK_S)
        while leader.poll() is None:  # wait() would not hear Ctrl-C: polars sets SA_RESTART
            time.sleep(_LOOK_S)


def _members(session: int) -> list[int]:
    """Living processes of a session (proc(5): stat fields 3 state, 6 session)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since we listed it
        # The name in brackets may hold spaces and brackets.
        fields = text[text.rindex(b")") + 2 :].split()
        if int(fields[3]) == session and fields[0] not in {b"Z", b"X"}:
            found.append(int(entry.name))
    return found
