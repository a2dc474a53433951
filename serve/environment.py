"""The environment variables of a job that uses an artifact, with notes for the user."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.doctor import ROLES, Machine, Role, find_other_plugin
from dynamiccl.errors import UnknownName
from dynamiccl.libraries import ADAPTIVE_NAME, PROFILER_NAME, TUNER_NAME, VENDOR_NAME
from dynamiccl.serve.artifact import Artifact

#: The mode of a job that says none.
DEFAULT_MODE: Final = "table"
#: DYNAMICCL_MODE -> what a user of it has to know. `sweep` is dynamiccl-collect's own.
MODES: Final[Mapping[str, str]] = {
    "table": "",
    "observe": "mode observe loads the profiler alone: NCCL's choices stay, calls are recorded "
    "where DYNAMICCL_CALLS_DIR says",
    "adaptive": "mode adaptive changes tables while the job runs, so results are not bitwise "
    "reproducible from run to run",
}
#: A vendor's tuner that ours asks first, in mode table.
NEXT_TUNER: Final = "DYNAMICCL_NEXT_TUNER"


@dataclass(frozen=True, slots=True)
class JobSettings:
    """The artifact, system and mode that a job is to use."""

    artifact: Artifact
    plugin: Path
    system: str | None = None
    mode: str | None = None


@dataclass(frozen=True, slots=True)
class Environment:
    """Variables to set, and notes, one line each."""

    variables: dict[str, str]
    notes: list[str]


def job_environment(job: JobSettings, machine: Machine) -> Environment:
    """The environment of a job; raises UnknownName for an unknown system or mode."""
    names = job.artifact.index.system_names
    if job.system is not None and job.system not in names:
        raise UnknownName("system", job.system, names, where="--system")
    if job.mode is not None and job.mode not in MODES:
        raise UnknownName("mode", job.mode, MODES, where="--mode")
    variables, notes = _libraries(job, machine)
    variables["DYNAMICCL_ARTIFACT"] = str(job.artifact.directory.resolve())
    if job.mode is not None:
        variables["DYNAMICCL_MODE"] = job.mode
    if job.system is not None:
        variables["DYNAMICCL_SYSTEM"] = job.system
    return Environment(variables, [*_about_artifact(job), *notes])


def _libraries(job: JobSettings, machine: Machine) -> tuple[dict[str, str], list[str]]:
    """Which libraries NCCL must load, by variable; and notes."""
    tuner, profiler = ROLES
    folder = job.plugin.resolve().parent
    if job.mode == "observe":
        loaded = {profiler: PROFILER_NAME}
    elif job.mode == "adaptive":
        loaded = {tuner: ADAPTIVE_NAME, profiler: ADAPTIVE_NAME}
    else:
        theirs = machine.env.get(NEXT_TUNER) or _displaced(tuner, machine)
        loaded = {tuner: VENDOR_NAME if theirs else TUNER_NAME}
        if not _displaced(profiler, machine):
            # NCCL 2.27 tells a profiler alone which communicator it is. Ours hears no event.
            loaded[profiler] = loaded[tuner]
    asked = loaded if job.mode in {"observe", "adaptive"} else {tuner}
    notes = [note for role in asked for note in _about_neighbour(role, job, machine)]
    variables = {role.variable: str(folder / name) for role, name in loaded.items()}
    if VENDOR_NAME in loaded.values():
        variables[NEXT_TUNER] = theirs
    return variables, notes


def _displaced(role: Role, machine: Machine) -> str:
    """The library that ours would replace; empty where there is none."""
    found = find_other_plugin(machine, role, behind_ours=True)
    return found.library if found is not None else ""


def _about_artifact(job: JobSettings) -> Iterator[str]:
    if job.mode is not None and MODES[job.mode]:
        yield MODES[job.mode]
    if job.mode == "observe":
        return
    index = job.artifact.index
    names = [job.system] if job.system is not None else index.system_names
    unbound = [name for name in names if not index.machines_of(name)]
    if unbound:
        yield (
            f"no machine is known to be {' or '.join(unbound)}, so the plugin abstains there: run "
            f"'dynamiccl-deploy bind {job.artifact.directory} --system {unbound[0]}' on one that is"
        )
    others = [name for name in job.artifact.manifest.launch_profiles if name != DEFAULT_PROFILE]
    if others:
        yield (
            f"launch profiles {', '.join(others)} were measured and have no tables in this "
            f"release: tables are made for the untouched environment, '{DEFAULT_PROFILE}', alone"
        )


def _about_neighbour(role: Role, job: JobSettings, machine: Machine) -> Iterator[str]:
    """Notes on other vendors' plugins that ours would replace."""
    found = find_other_plugin(machine, role, behind_ours=True)
    if found is None:
        return
    if not found.library:
        yield f"{found.place} now, which these lines replace"
    elif role.name == "tuner" and (job.mode or DEFAULT_MODE) == DEFAULT_MODE:
        if NEXT_TUNER not in machine.env:
            yield (
                f"displaces a tuner: {found.place}; {VENDOR_NAME} asks it before ours, as "
                f"{NEXT_TUNER} says"
            )
    else:
        yield f"displaces a {role.name}: {found.place}; mode {job.mode} calls none but ours"
