"""Launchers: what to start on this machine for a program that runs as ranks on nodes; running it.

`command` goes from `Ranks` and the sweep's `[launcher]` to a `Command`, which `run_process` runs.

local   the program itself: one process that drives all GPUs (`-g N` of nccl-tests)
mpirun  Open MPI 4 and 5. It forwards output in chunks, not lines, so two ranks may share a line:
        nccl-tests prints its tables from one rank, and NCCL's logs must go to NCCL_DEBUG_FILE
srun    a step of the current Slurm allocation. Output keeps srun's line buffering, since with
        --unbuffered lines of several ranks mix. Variables go through srun's own environment:
        `--export=NAME=VALUE` cuts values at commas. How ranks find each other is the cluster's
        matter: for Open MPI, put `--mpi=pmix` into extra_args
sbatch  srun, inside the batch job that runs the sweep (`start.py`)

Containers: Pyxis is a plugin of srun, and its options are srun's (github.com/NVIDIA/pyxis, wiki
"Usage"). Apptainer (apptainer.org, user guide: "Bind Paths and Mounts", "Environment and Metadata")
is a program before every rank.

A program runs in a session of its own, so that a terminal's Ctrl-C reaches us only, who then decide
(`Interrupt`). To end it, a signal goes to the leader's process group first, since srun and mpirun
end their ranks on other nodes when asked. What is left after that is killed by session: mpirun
gives each local rank a group of its own.
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
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from types import FrameType
from typing import IO, Any, Final, Literal, Self

from pydantic import Field

from dynamiccl.errors import InvalidSweep, MachineError, UnknownName
from dynamiccl.simulator.toml_table import Table

_log = logging.getLogger(__name__)


class ContainerSettings(Table):
    """The container that every rank runs in."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    #: `host:container[:options]`, as the runtime writes it.
    mounts: tuple[str, ...] = ()


class LauncherSettings(Table):
    """The `[launcher]` table of a sweep file; all options are passed through as written."""

    kind: Literal["local", "mpirun", "srun", "sbatch"] = "local"
    extra_args: tuple[str, ...] = ()
    #: Words before the benchmark on every rank, e.g. numactl.
    prefix: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    #: Lines for the head of the batch script, e.g. "--time=02:00:00".
    sbatch_header: tuple[str, ...] = ()
    #: Elements of the job array that share the sweep.
    array: int = Field(default=1, ge=1)
    container: ContainerSettings | None = None


@dataclass(frozen=True, slots=True)
class Ranks:
    """A program to run on nodes: `ranks_per_node` processes on each of `num_nodes`."""

    #: The program and its arguments, as they are inside the container where there is one.
    argv: tuple[str, ...]
    #: What must be set on every rank.
    env: Mapping[str, str] = field(default_factory=dict)
    num_nodes: int = 1
    ranks_per_node: int = 1
    #: What must be absent on every rank.
    unset: tuple[str, ...] = ()
    #: Whether it runs beside another step of the same allocation.
    overlap: bool = False


@dataclass(frozen=True, slots=True)
class Command:
    """What to start on this machine: an argument vector, and changes to our environment."""

    argv: tuple[str, ...]
    #: Set in the environment of the started process, over what is there.
    env: Mapping[str, str] = field(default_factory=dict)
    #: Taken out of the environment of the started process.
    unset: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The equivalent POSIX shell line, for logs and messages."""
        changes = [word for name in self.unset for word in ("-u", name)]
        changes += [f"{name}={value}" for name, value in sorted(self.env.items())]
        return shlex.join([*(["env"] if changes else []), *changes, *self.argv])


def _local(ranks: Ranks, settings: LauncherSettings) -> Command:
    if settings.extra_args:
        raise InvalidSweep(
            f"launcher 'local' takes no extra_args ({' '.join(settings.extra_args)}); words before "
            "the benchmark go into launcher.prefix"
        )
    return Command(*_in_container(ranks, settings), ranks.unset)


#: Options of mpirun that say where ranks are bound.
_BINDING: Final = {"--bind-to", "-bind-to", "--cpu-set", "--rankfile", "-rf", "--cpu-list"}


def _mpirun(ranks: Ranks, settings: LauncherSettings) -> Command:
    # Ranks on other nodes get their node's environment, so the rank itself unsets variables.
    rank, env = _in_container(ranks, settings, unset=True)
    argv = (
        "mpirun",
        # Open MPI refuses to run as root without this option.
        *(["--allow-run-as-root"] if os.getuid() == 0 else []),
        *("-np", str(ranks.num_nodes * ranks.ranks_per_node)),
        *("--map-by", f"ppr:{ranks.ranks_per_node}:node"),
        # Open MPI 4 binds up to two ranks to one core each, which would make NCCL's proxy threads
        # and the benchmark share it.
        *([] if _BINDING & set(settings.extra_args) else ["--bind-to", "none"]),
        *_each("-x", [f"{name}={env[name]}" for name in sorted(env)]),
        *settings.extra_args,
        *rank,
    )
    # Inside an allocation mpirun starts its daemons by srun, as a step that would wait for others.
    beside = {"SLURM_OVERLAP": "1"} if ranks.overlap else {}
    return Command(argv, {**env, **beside}, ranks.unset)


def _srun(ranks: Ranks, settings: LauncherSettings) -> Command:
    rank, env = _in_container(ranks, settings)
    argv = (
        "srun",
        *("-N", str(ranks.num_nodes), "-n", str(ranks.num_nodes * ranks.ranks_per_node)),
        f"--ntasks-per-node={ranks.ranks_per_node}",
        # Said outright: a job submitted with --export=NONE would start steps without variables.
        "--export=ALL",
        # A rank that dies leaves the others waiting for it.
        "--kill-on-bad-exit=1",
        *(["--overlap"] if ranks.overlap else []),
        *_pyxis_options(env, settings.container),
        *settings.extra_args,
        *rank,
    )
    return Command(argv, env, ranks.unset)


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """One way to start ranks."""

    command: Callable[[Ranks, LauncherSettings], Command]
    #: Whether ranks are processes of their own: a benchmark built with MPI, and `-g 1`.
    needs_mpi: bool = True
    #: Whether srun starts them.
    is_slurm: bool = False
    #: Whether the whole sweep runs inside a batch job.
    is_batch: bool = False
    #: Seconds that it takes to end ranks which do not end by themselves.
    grace_s: float = 5.0


#: Slurm sends SIGKILL 30 s after SIGTERM (slurm.conf, KillWait), and srun waits 2 s more for that.
_SRUN_GRACE_S: Final = 40.0

#: All there are; what a sweep file and the command line may name.
LAUNCHERS: Final[Mapping[str, Launcher]] = {
    "local": Launcher(command=_local, needs_mpi=False),
    "mpirun": Launcher(command=_mpirun),
    "srun": Launcher(command=_srun, is_slurm=True, grace_s=_SRUN_GRACE_S),
    "sbatch": Launcher(command=_srun, is_slurm=True, is_batch=True, grace_s=_SRUN_GRACE_S),
}


def find_launcher(name: str) -> Launcher:
    """The launcher called `name`. Raises UnknownName with the choices."""
    if name not in LAUNCHERS:
        raise UnknownName("launcher", name, LAUNCHERS)
    return LAUNCHERS[name]


def command(ranks: Ranks, settings: LauncherSettings) -> Command:
    """What to start for `ranks` under the launcher that `settings.kind` names.

    Raises UnknownName, and InvalidSweep where the launcher cannot start such ranks.
    """
    launcher, container = find_launcher(settings.kind), settings.container
    if ranks.num_nodes > 1 and not launcher.needs_mpi:
        raise InvalidSweep(
            f"launcher '{settings.kind}' starts one process on this machine, but a group has "
            f"num_nodes = {ranks.num_nodes}; take launcher mpirun, srun or sbatch, or groups of "
            "one node"
        )
    if container is not None and container.runtime == "pyxis" and not launcher.is_slurm:
        raise InvalidSweep(
            f"container runtime 'pyxis' is a plugin of srun and does not work with launcher "
            f"'{settings.kind}'; take launcher srun or sbatch, or runtime apptainer"
        )
    return launcher.command(ranks, settings)


def map_into_container(path: str, container: ContainerSettings | None) -> str:
    """Where an absolute path of the host lies inside the container; the innermost mount counts.

    Raises InvalidSweep for a path under no mount.
    """
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


def _in_container(
    ranks: Ranks, settings: LauncherSettings, *, unset: bool = False
) -> tuple[tuple[str, ...], dict[str, str]]:
    """What every rank runs inside its container, and the variables set where it starts, outside.

    `unset`: the launcher hands ranks another environment than our own, so that each drops variables
    itself. An image's variables always need it. Pyxis needs no words here: it is options of srun.
    """
    env = {**settings.env, **ranks.env}
    env = {name: value for name, value in env.items() if name not in ranks.unset}
    container = settings.container
    drop: tuple[str, ...] = ()
    if ranks.unset and (unset or container is not None):
        drop = ("env", *_each("-u", ranks.unset))
    argv = (*drop, *settings.prefix, *ranks.argv)
    if container is None or container.runtime == "pyxis":
        return argv, env
    # Set under this prefix a variable wins over what the image sets, and PATH and LD_LIBRARY_PATH
    # arrive too. The option --env would cut values at commas.
    inside = {f"APPTAINERENV_{name}": value for name, value in env.items()}
    binds = _each("--bind", container.mounts)
    return ("apptainer", "exec", "--nv", *binds, container.image, *argv), {**env, **inside}


def _pyxis_options(env: Mapping[str, str], container: ContainerSettings | None) -> tuple[str, ...]:
    if container is None or container.runtime != "pyxis":
        return ()
    # By name the image is imported once on a node and not for each launch; the first one makes it.
    digest = hashlib.sha256(container.image.encode()).hexdigest()[:8]
    options = [f"--container-image={container.image}", f"--container-name=dynamiccl-{digest}"]
    if container.mounts:
        options.append(f"--container-mounts={','.join(container.mounts)}")
    if env:
        # Without it a variable that the image sets too keeps the image's value.
        options.append(f"--container-env={','.join(sorted(env))}")
    return tuple(options)


def _each(option: str, values: Sequence[str]) -> list[str]:
    return [word for value in values for word in (option, value)]


# --- Running it ---

#: Seconds between looks at the clock, the leader and the interrupt while no output comes, and at
#: what is about to end.
_LOOK_S: Final = 0.05
_SHORT_LOOK_S: Final = 0.005
#: Seconds that output may still come after the leader's end, from a child that holds the pipe.
_LINGER_S: Final = 0.5
#: Seconds that the kernel may take to end what got SIGKILL, before we stop waiting.
_KILLED_S: Final = 5.0
#: Lines of output that are kept; the callback sees all of them.
KEPT_LINES: Final = 200_000
#: A longer line is handed on in pieces: a runaway log must not fill our memory.
MAX_LINE_BYTES: Final = 1 << 20

#: Takes a line without its end and when it arrived, in seconds since the epoch; tells whether it is
#: progress.
OnLine = Callable[[str, float], bool]


class Interrupt:
    """Handles the signals that end a run, as a context manager; in the main thread only.

    The first signal sets `requested`: finish the running trial, start nothing more. Those that
    Slurm sends before a time limit or preemption (SIGUSR1, SIGTERM) do no more than that. A second
    Ctrl-C sets `forced`: code that waits calls `check`, and a running process is killed. A third
    one raises KeyboardInterrupt at once, wherever the program is.
    """

    def __init__(self) -> None:
        self.requested = self.forced = False
        #: Name of the first signal; empty before it.
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
        """Raise KeyboardInterrupt when the user wants to stop at once."""
        if self.forced:
            raise KeyboardInterrupt

    def _received(self, number: int, _frame: FrameType | None) -> None:
        if self.forced and number == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested:
            # A batch job gets SIGUSR1 and then SIGTERM, at times twice: only a person insists.
            self.forced |= number == signal.SIGINT
            return
        self.requested = True
        self.cause = signal.Signals(number).name
        _log.warning("%s: stopping after the running trial; Ctrl-C to stop at once", self.cause)


@dataclass(frozen=True, slots=True)
class Limits:
    """Timeouts after which a program counts as hung, in seconds."""

    #: Until the first line that counts as progress.
    startup_s: float
    #: Between two lines that count as progress.
    stall_s: float
    #: Between SIGTERM and SIGKILL, for srun or mpirun to end ranks on other nodes.
    grace_s: float = 5.0
    #: What the next step may take on top of both, asked at the start and after each progress.
    more_s: Callable[[], float] = lambda: 0.0


@dataclass(frozen=True, slots=True)
class Finished:
    """Exit status and output of a program."""

    #: As a shell counts: negative = ended by that signal; None = it hung, and we ended it.
    returncode: int | None
    #: The last `KEPT_LINES` lines.
    lines: tuple[str, ...]

    @property
    def output(self) -> str:
        """The lines as one text."""
        return "".join(f"{line}\n" for line in self.lines)


def run_process(
    command: Command,
    limits: Limits,
    on_line: OnLine = lambda *_: True,
    interrupt: Interrupt | None = None,
) -> Finished:
    """Run a program to its end, or end it with all its children when it hangs.

    `on_line` takes every line of stdout and stderr.

    Raises MachineError when the program cannot be started, and KeyboardInterrupt on a second
    Ctrl-C; then no process of the program is left.
    """
    leader = start_session(command, subprocess.PIPE)
    output = _Output(leader, on_line)
    try:
        is_hung = _follow(leader, output, limits, interrupt)
        if not is_hung:
            output.hand_on(_LINGER_S)
        # Whether it ended by itself or not: what it left running, too.
        end_session(leader, limits.grace_s, meanwhile=output.hand_on)
        output.hand_on(_LINGER_S)
    except BaseException:
        end_session(leader, limits.grace_s)
        raise
    finally:
        output.pipe.close()
    return Finished(None if is_hung else leader.returncode, tuple(output.lines))


def start_session(
    command: Command, output: int | IO[bytes], *, stdin: int = subprocess.DEVNULL
) -> subprocess.Popen[bytes]:
    """Start a command as leader of a new session, with stdout and stderr together in `output`.

    Raises MachineError when the program is not there or cannot be executed.
    """
    kept = {name: value for name, value in os.environ.items() if name not in command.unset}
    try:
        return subprocess.Popen(
            command.argv,
            env={**kept, **command.env},
            stdin=stdin,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(
            f"cannot start '{command.argv[0]}': {error.strerror}; install it, or correct its path "
            f"(whole command: {command.text})"
        ) from error


def end_session(
    leader: subprocess.Popen[bytes], grace_s: float, meanwhile: Callable[[], object] = lambda: None
) -> None:
    """End the whole session: SIGTERM to its group, after `grace_s` seconds SIGKILL to all of it.

    The leader is reaped here. `meanwhile` is called while waiting, e.g. to read output that would
    block the leader. An exception meanwhile (a third Ctrl-C) cuts the grace short.
    """
    if leader.returncode is not None:
        return  # reaped: its number may be somebody else's by now
    try:
        # What has ended between our look and now is what we want; so below.
        with suppress(ProcessLookupError):
            os.killpg(leader.pid, signal.SIGTERM)
        deadline = time.monotonic() + grace_s
        while _members(leader.pid) and time.monotonic() < deadline:
            meanwhile()
            time.sleep(_SHORT_LOOK_S)
    finally:
        # Again and again, since a process may start another one between our look and its end.
        deadline = time.monotonic() + _KILLED_S
        while (members := _members(leader.pid)) and time.monotonic() < deadline:
            for pid in members:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(_SHORT_LOOK_S)
        leader.wait()


def _has_ended(leader: subprocess.Popen[bytes]) -> bool:
    # Without reaping it: so its number stays its own until all of its session has ended.
    return os.waitid(os.P_PID, leader.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _members(session: int) -> list[int]:
    """Living processes of a session, from /proc/PID/stat (proc(5): fields 3 state, 6 session)."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            text = (entry / "stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since we listed it
        # The name stands in brackets and may hold spaces and brackets itself.
        fields = text[text.rindex(b")") + 2 :].split()
        if int(fields[3]) == session and fields[0] not in {b"Z", b"X"}:
            found.append(int(entry.name))
    return found


def _follow(
    leader: subprocess.Popen[bytes], output: "_Output", limits: Limits, interrupt: Interrupt | None
) -> bool:
    """Read until the program ends or is interrupted; returns True when it hangs."""
    deadline = time.monotonic() + limits.startup_s + limits.more_s()
    while not _has_ended(leader):
        output.hand_on(_LOOK_S)
        if output.progressed:
            output.progressed = False
            deadline = time.monotonic() + limits.stall_s + limits.more_s()
        if interrupt is not None:
            interrupt.check()
        if time.monotonic() >= deadline:
            return True
    return False


class _Output:
    """Hands on the lines of a program, whose pipe somebody that it left behind may hold open."""

    def __init__(self, leader: subprocess.Popen[bytes], on_line: OnLine) -> None:
        assert leader.stdout is not None
        self.pipe = leader.stdout
        self.lines: deque[str] = deque(maxlen=KEPT_LINES)
        self.progressed = False
        self._on_line = on_line
        #: Of the line that has no end yet.
        self._rest = b""

    def hand_on(self, wait_s: float = _SHORT_LOOK_S) -> None:
        """Hand on the lines that arrive within so many seconds; returns early after the last."""
        deadline = time.monotonic() + wait_s
        while (left_s := deadline - time.monotonic()) > 0:
            if not select.select([self.pipe], [], [], left_s)[0]:
                return
            read = os.read(self.pipe.fileno(), MAX_LINE_BYTES)
            *whole, self._rest = (self._rest + read).split(b"\n")
            if self._rest and (not read or len(self._rest) > MAX_LINE_BYTES):
                whole, self._rest = [*whole, self._rest], b""
            for raw in whole:
                self._take(raw)
            if not read:
                time.sleep(min(left_s, _SHORT_LOOK_S))
                return

    def _take(self, raw: bytes) -> None:
        # A pseudo-terminal (srun --unbuffered) ends lines with a carriage return too.
        text = raw.removesuffix(b"\r").decode(errors="replace")
        self.lines.append(text)
        self.progressed |= self._on_line(text, time.time())
