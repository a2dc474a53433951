"""Launchers: what to start on this machine for a program that runs as ranks on nodes.

Functions from `Ranks` and the sweep's `[launcher]` to a `Command`; nothing is started here.

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
"""

import hashlib
import os
import posixpath
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Final, Literal

from pydantic import Field

from dynamiccl.errors import InvalidSweep, UnknownName
from dynamiccl.simulator.toml_table import Table


class ContainerSettings(Table):
    """The container that every rank runs in."""

    runtime: Literal["pyxis", "apptainer"]
    image: str
    #: `host:container[:options]`, as the runtime writes it.
    mounts: tuple[str, ...] = ()


class LauncherSettings(Table):
    """The `[launcher]` table of a sweep file; all options are passed through as written."""

    kind: str = "local"
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
