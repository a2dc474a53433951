"""`dynamiccl-deploy doctor`: whether NCCL loads the plugin here, and whether it acts (read-only).

Machines that are alike print alike; a job's ranks compare the same values.
"""

import json
import os
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from dynamiccl import doctor as checking
from dynamiccl.datasets.manifest import AB_NAME, KILL_NAME
from dynamiccl.datasets.store import file_sha256
from dynamiccl.doctor import Check, CheckStatus, Machine, judge
from dynamiccl.errors import CorruptFile, DynamicclError, PluginError
from dynamiccl.libraries import TUNER_NAME, VENDOR_NAME, built, is_ours
from dynamiccl.nccl import NEWEST_ACTING, OLDEST_ACTING, TUNER_ABI_SINCE, NcclVersion
from dynamiccl.serve.ab import DEFAULT_MODE, PROVEN
from dynamiccl.serve.artifact import Artifact, Nccl, how_to_bind, installed_plugin, open_artifact
from dynamiccl.serve.build import ask_probe, first_that_loads, nccl_libraries
from dynamiccl.train.options import Json

OK, WARN, FAIL, UNKNOWN = CheckStatus
#: Names the vendor's tuner that is asked first.
NEXT_TUNER: Final = "DYNAMICCL_NEXT_TUNER"
#: ABI versions of our profilers (NCCL `src/plugin/profiler.cc`, 2.27 to 2.29).
PROFILER_ABI: Final = (4, 5, 6)
_NOT_BOUND: Final = (
    "not bound: groups, whose calls' channels add up; registered NVLS buffers, for which NCCL sets "
    "its own (2.30.7 src/register/coll_reg.cc:122,196); symmetric and copy-engine kernels and "
    "point-to-point, about which it asks no tuner"
)
_NOT_KNOWN: Final = "whether tables act here is not known"
_NO_GPU: Final = "gpu=none*0;"


def check_for_job(
    machine: Machine, plugin: Path, artifact: Path | None = None, nccl: Path | None = None
) -> Iterator[Check]:
    """Checks in the order in which a job meets problems; `nccl`: the jobs' libnccl.so.2."""
    libraries = nccl_libraries(machine, nccl)
    yield from _nccl(libraries)
    yield _plugin(plugin, machine)
    yield from _neighbours(machine)
    yield from checking.check_settings(machine)
    opened = None
    if artifact is None:
        yield Check("artifact", UNKNOWN, "none named", "add ARTIFACT, or set DYNAMICCL_ARTIFACT")
    else:
        try:
            opened = open_artifact(artifact)
        except DynamicclError as error:
            yield Check("artifact", FAIL, str(error), "until then every job under it abstains")
        else:
            yield from _artifact(opened)
    version = first_that_loads(libraries)
    directory = None if opened is None else opened.directory
    key = machine.env.get("DYNAMICCL_KEY_FILE", "")
    named = key or "DYNAMICCL_KEY_FILE is not set; dynamiccl-run sets it, one host needs none"
    try:
        said = ask_probe(machine, plugin, nccl=version, artifact=directory)
    except PluginError as error:
        yield Check("machine", UNKNOWN, str(error), _NOT_KNOWN)
        yield Check("key", UNKNOWN, named, "whether jobs can use it is not known")
        return
    if refused := said["artifact_problem"]:
        owner = "it must be root's or the job's user's, who alone may write to it"
        yield Check("index", FAIL, f"the plugin refuses plugin.index: {refused}", owner)
    if said["machine_problem"]:
        yield Check("machine", UNKNOWN, said["machine_problem"], _NOT_KNOWN)
    elif opened is not None and not refused:
        yield from _machine(opened, version, said)
    problem = said["key_problem"]
    mend = f"chmod 600 {key}, or " if problem.startswith("others may") else ""
    yield judge(
        "key",
        f"{key}: {problem}" if problem else named,
        (bool(problem), FAIL, f"{mend}take it out: dynamiccl-run names one"),
    )


def _nccl(libraries: Mapping[str, NcclVersion | str]) -> Iterator[Check]:
    versions = {str(v) for v in libraries.values() if isinstance(v, NcclVersion)}
    if not libraries:
        found = "none beside PyTorch, in LD_LIBRARY_PATH or in ldconfig's list"
        advice = "name the jobs' own with --nccl; a program may also have NCCL linked in"
        yield Check("libnccl", UNKNOWN, found, advice)
    for path, version in libraries.items():
        if isinstance(version, str):
            yield Check("libnccl", WARN, version, "jobs would fail: name their own with --nccl")
            continue
        minor = NcclVersion(version.major, version.minor)
        first = TUNER_ABI_SINCE[4]
        abstains = "every job keeps NCCL's own choice:"
        blind = f"before NCCL {OLDEST_ACTING} a tuner is not told which communicator it is"
        unread = f"what releases after {NEWEST_ACTING} ask a tuner was not read in their source"
        several = f"several versions are here ({', '.join(sorted(versions))}): do jobs load this?"
        yield judge(
            "libnccl",
            f"NCCL {version}, {path}",
            (minor < first, FAIL, f"our tuners need NCCL {first} or later"),
            (minor < OLDEST_ACTING, WARN, f"{abstains} {blind}"),
            (minor > NEWEST_ACTING, WARN, f"{abstains} {unread}"),
            (len(versions) > 1, WARN, several),
        )


def _plugin(plugin: Path, machine: Machine) -> Check:
    # The tuner is a profiler only to be told on NCCL 2.27 which communicator it is.
    profilers = (4,) if plugin.name in {TUNER_NAME, VENDOR_NAME} else PROFILER_ABI
    symbols = [f"ncclTunerPlugin_v{k}" for k in TUNER_ABI_SINCE]
    symbols += [f"ncclProfiler_v{k}" for k in profilers]
    check = checking.check_plugin(machine, str(plugin.resolve()), symbols)
    if check.status is not OK:
        return check
    return replace(check, found=f"{check.found}, {file_sha256(plugin)[:16]}")


def _neighbours(machine: Machine) -> Iterator[Check]:
    mode = machine.env.get("DYNAMICCL_MODE", DEFAULT_MODE)
    asks_next = NEXT_TUNER in machine.env
    for role in checking.ROLES:
        found = checking.find_other_plugin(machine, role)
        name = f"NCCL's {role.name}"
        if found is None:
            yield Check(name, OK, f"none is set or found; dynamiccl-run sets {role.variable}")
        elif is_ours(found.library):
            theirs = checking.find_other_plugin(machine, role, behind_ours=True)
            kept = asks_next and Path(found.library).name == VENDOR_NAME
            displaced = role.name == "tuner" and theirs is not None and not kept
            place = f", in place of {theirs.place}" if theirs and displaced else ""
            advice = f"use dynamiccl-run without {role.variable}: it has both asked"
            yield judge(name, f"ours, {found.library}{place}", (displaced, WARN, advice))
        elif role.name == "profiler" and mode == DEFAULT_MODE:
            stays = "it stays, and on NCCL 2.27, which tells a profiler alone which communicator"
            yield Check(name, OK, f"{found.place}; {stays} it is, the tuner leaves all to NCCL")
        else:
            kept = mode == DEFAULT_MODE and asks_next
            yield judge(
                name,
                f"{found.place}; asked before ours ({NEXT_TUNER})" if kept else found.place,
                (not found.library, WARN, f"take {role.variable} out, or use dynamiccl-run"),
                (mode != DEFAULT_MODE, WARN, f"mode {mode} calls none but ours: we do not load"),
                (not kept, WARN, f"dynamiccl-run loads {VENDOR_NAME}, which asks it before ours"),
            )


def _artifact(opened: Artifact) -> Iterator[Check]:
    yield Check("artifact", OK, f"{opened.directory}: whole, {opened.index.sha256[:16]}")
    yield judge(
        "gate",
        opened.in_short,
        (not opened.is_gated, WARN, "use 'dynamiccl-evaluate gate', and export that"),
    )
    for what, advice in opened.warnings:
        yield Check("tables", WARN, what, advice)
    slack = opened.manifest.slack
    if slack is not None and slack.max_channels is not None:
        found = f"at most {slack.max_channels}, call by call"
        yield Check("channels", WARN, found, _NOT_BOUND)
    yield from _ab(opened)
    if (opened.directory / KILL_NAME).exists():
        found = f"{opened.directory / KILL_NAME} is there"
        yield Check("kill file", WARN, found, "remove it to use the tables")


def _ab(opened: Artifact) -> Iterator[Check]:
    path, slack = opened.directory / AB_NAME, opened.manifest.slack
    by_step = slack is not None and bool(slack.hidden)
    verdict, found = "", "not tested by an A/B, and the promise is about the step"
    if path.exists():
        try:
            record = json.loads(path.read_bytes())
            verdict, job = record["verdict"], shlex.join(record["command"])
            found = f"{verdict}: {record['said'][0]}; {record['created'][:10]}, {job}"
        except (ValueError, LookupError, TypeError) as error:
            raise CorruptFile(f"{path} is not what 'ab' writes: {error!r}; remove it") from error
    elif not by_step:
        return
    plugin = installed_plugin(opened.directory)
    again = f"dynamiccl-deploy ab --home {plugin.parents[1] if plugin else 'DIR'} -- COMMAND"
    off = f"keep it off: touch {opened.directory / KILL_NAME}; then export it anew"
    unproven = by_step and verdict not in PROVEN
    yield judge(
        "A/B",
        found,
        (verdict in {"worse", "fails"}, WARN, off),
        (unproven, WARN, f"with more --pairs: {again}" if verdict else again),
    )


def _machine(
    opened: Artifact, version: NcclVersion | None, said: Mapping[str, Any]
) -> Iterator[Check]:
    here, system = said["fingerprint"], said["system"]
    found = f"{here}: {f'known, {system}' if system else 'unknown to the artifact'}"
    yield judge(
        "machine",
        found,
        (version is None, UNKNOWN, "the jobs' NCCL is not known: name it with --nccl"),
        (
            system is not None and here.startswith(_NO_GPU),
            UNKNOWN,
            "no GPU is seen here: run doctor where jobs run, e.g. under srun -N1 --gpus=1",
        ),
        (
            system is None,
            FAIL,
            "every job here abstains; if its tables were measured on a machine like this: "
            f"{how_to_bind(opened.directory)}",
        ),
    )
    if system is not None:
        acting = [
            f"{info.num_ranks} ranks on {info.num_nodes} nodes ({info.acting} size bins)"
            for info in opened.tables
            if info.system == system and info.acting
        ]
        yield judge(
            "tables that act here",
            "; ".join(acting) or f"none of {system}",
            (not acting, WARN, "every job here keeps NCCL's own choice"),
        )


def doctor_command(
    artifact: Annotated[
        Path | None,
        typer.Argument(metavar="[ARTIFACT]", help="Artifact; default DYNAMICCL_ARTIFACT."),
    ] = None,
    plugin: Annotated[
        Path | None,
        typer.Option(
            help="The plugin; default NCCL_TUNER_PLUGIN where ours, else installed or built."
        ),
    ] = None,
    nccl: Nccl = None,
    as_json: Json = False,
) -> None:
    """Look at this machine before a job: what NCCL would load, and whether tables would act.

    Exit code 4 when something failed. On all nodes, to see what only some have:
    srun dynamiccl-deploy doctor ARTIFACT | sort | uniq -c

    Example: dynamiccl-deploy doctor out/artifact --nccl /opt/nccl/lib/libnccl.so.2
    """
    named, loaded = (os.environ.get(n) for n in ("DYNAMICCL_ARTIFACT", "NCCL_TUNER_PLUGIN"))
    artifact = artifact or (Path(named) if named else None)
    if plugin is None and loaded and is_ours(loaded):
        plugin = Path(loaded)
    if plugin is None and artifact is not None:
        plugin = installed_plugin(artifact)
    checks = check_for_job(Machine(), plugin or built(TUNER_NAME), artifact, nccl)
    raise typer.Exit(checking.report([*checks], as_json=as_json))
