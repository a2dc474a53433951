"""Checks whether NCCL on this machine loads the plugin, and whether it acts (read-only)."""

import os
import re
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dynamiccl.checks import Check, fail, ok, unknown, warn
from dynamiccl.datasets.manifest import KILL_NAME
from dynamiccl.errors import DynamicclError, PluginError
from dynamiccl.libraries import TUNER_NAME, VENDOR_NAME, is_ours
from dynamiccl.machine import Machine
from dynamiccl.nccl import NEWEST_ACTING, OLDEST_ACTING, TUNER_ABI_SINCE, NcclVersion
from dynamiccl.nccl_setup import (
    ROLES,
    Origin,
    OtherPlugin,
    Role,
    find_displaced,
    find_other_plugin,
    is_efficiency_policy,
    is_new_enqueue,
)
from dynamiccl.nccl_setup import nccl_settings as settings_of
from dynamiccl.serve.artifact import Artifact, TableInfo, open_artifact
from dynamiccl.serve.environment import DEFAULT_MODE, NEXT_TUNER
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.this_machine import NcclLibrary, ask_probe, nccl_libraries

#: First NCCL release that takes each profiler ABI (`src/plugin/profiler.cc` and forebears).
PROFILER_ABI_SINCE: Final = {
    4: NcclVersion(2, 27),
    5: NcclVersion(2, 28),
    6: NcclVersion(2, 29),
}
#: From this release on a tuner's number of channels is an upper bound.
CHANNELS_ARE_A_BOUND_SINCE: Final = NcclVersion(2, 31)
#: What the plugin promises to need at most, so that it loads in every container.
GLIBC_PROMISED: Final = (2, 28)
#: Loads the plugin as NCCL does (RTLD_NOW | RTLD_LOCAL) in a process that has loaded nothing else.
ASK_PLUGIN: Final = (
    "import ctypes, os, sys; so = ctypes.CDLL(sys.argv[1], mode=os.RTLD_NOW | os.RTLD_LOCAL); "
    "print(*[n for n in sys.argv[2:] if hasattr(so, n)])"
)
MIN_KEY_BYTES: Final = 16
#: How the fingerprint of a machine without a GPU begins.
_NO_GPU: Final = "gpu=none*0;"
_BEATS_A_TUNER: Final = ("NCCL_ALGO", "NCCL_PROTO")
_GLIBC: Final = re.compile(rb"GLIBC_(\d+)\.(\d+)")


@dataclass(frozen=True, slots=True)
class Question:
    """What to check."""

    plugin: Path
    artifact: Path | None
    nccl: Path | None = None


def run_checks(machine: Machine, question: Question) -> list[Check]:
    """All checks, in the order in which a job would meet the problems."""
    libraries = nccl_libraries(machine, question.nccl)
    return [
        *check_nccl(libraries),
        *check_plugin(machine, question.plugin),
        *(_neighbour(machine, role) for role in ROLES),
        *check_settings(machine),
        *check_artifact(machine, question, libraries),
        check_key(machine),
        *_sampling(machine),
    ]


def check_nccl(libraries: list[NcclLibrary]) -> Iterator[Check]:
    """Which libnccl is found, and which plugin interfaces it supports."""
    if not libraries:
        yield unknown(
            "libnccl",
            "none beside PyTorch, in LD_LIBRARY_PATH or in ldconfig's list",
            "name the jobs' own with --nccl; a program may also have NCCL linked in",
        )
    for library in libraries:
        place = f"{library.path} ({library.origin})"
        if library.version is None:
            yield warn("libnccl", f"{place} does not load: {library.problem}", "jobs would fail")
        else:
            yield _versions(library.version, place)
    versions = sorted({library.version for library in libraries if library.version is not None})
    if len(versions) > 1:
        yield warn(
            "libnccl",
            f"several versions: {', '.join(map(str, versions))}",
            "a fingerprint holds the version: see that jobs and artifact mean the same one",
        )


def _versions(version: NcclVersion, place: str) -> Check:
    tuner = max((k for k, since in TUNER_ABI_SINCE.items() if since <= version), default=None)
    profiler = max((k for k, since in PROFILER_ABI_SINCE.items() if since <= version), default=None)
    found = f"NCCL {version}, {place}"
    if tuner is None:
        return fail("libnccl", found, f"tuners need NCCL {TUNER_ABI_SINCE[2]} or later")
    found += f": takes tuner v{tuner}" + (f" and profiler v{profiler}" if profiler else "")
    minor = (version.major, version.minor)
    if minor < (OLDEST_ACTING.major, OLDEST_ACTING.minor):
        return warn(
            "libnccl",
            found,
            f"before NCCL {OLDEST_ACTING} a tuner is not told which communicator it is: every job "
            "keeps NCCL's own choice",
        )
    if minor > (NEWEST_ACTING.major, NEWEST_ACTING.minor):
        return warn(
            "libnccl",
            found,
            "what it asks a tuner was not read in its source: every job keeps NCCL's own choice",
        )
    return ok("libnccl", found)


def check_plugin(machine: Machine, plugin: Path) -> Iterator[Check]:
    """Whether the library loads by itself, and which libraries it needs."""
    if not plugin.is_file():
        yield fail("plugin", f"none at {plugin}", "build it with 'make plugin', or name --plugin")
        return
    # The tuner hears of no call: it is a profiler only to be told on NCCL 2.27 who it is.
    profilers = (4,) if plugin.name in {TUNER_NAME, VENDOR_NAME} else PROFILER_ABI_SINCE
    wanted = [
        *(f"ncclTunerPlugin_v{k}" for k in TUNER_ABI_SINCE),
        *(f"ncclProfiler_v{k}" for k in profilers),
    ]
    ran = machine.run(sys.executable, "-c", ASK_PLUGIN, str(plugin.resolve()), *wanted)
    last = ran.output.strip().rpartition("\n")[2]
    if not ran.worked:
        yield fail(
            "plugin",
            f"{plugin} does not load: {last or 'no output'}",
            "NCCL would go on without it and say so in its log only; build it on a machine like "
            "this: 'make plugin'",
        )
        return
    missing = [name for name in wanted if name not in last.split()]
    if missing:
        yield fail("plugin", f"{plugin} lacks {', '.join(missing)}", "build it: 'make plugin'")
    else:
        yield ok("plugin", f"{plugin} loads by itself and has all interfaces")
    yield _needs(plugin)


def _needs(plugin: Path) -> Check:
    data = plugin.read_bytes()
    versions = {(int(major), int(minor)) for major, minor in _GLIBC.findall(data)}
    newest = max(versions, default=(2, 0))
    found = f"needs glibc {newest[0]}.{newest[1]}; here {_own_glibc()}"
    advice = "a container with an older one does not load it; build it with an unchanged release"
    if newest > GLIBC_PROMISED:
        return warn("plugin's needs", found, advice)
    if b"libstdc++.so" in data:
        return warn("plugin's needs", f"{found}; and libstdc++", advice)
    return ok("plugin's needs", f"{found}; no libstdc++")


def _own_glibc() -> str:
    try:
        return (os.confstr("CS_GNU_LIBC_VERSION") or "unknown").removeprefix("glibc ")
    except (ValueError, OSError):
        return "another C library"


def _neighbour(machine: Machine, role: Role) -> Check:
    """Check the plugin of another vendor that NCCL would load in this role now."""
    name = f"NCCL's {role.name}"
    found = find_other_plugin(machine, role)
    if found is None:
        return ok(name, f"none is set or found; dynamiccl-run sets {role.variable}")
    if is_ours(found.library):
        return _ours(machine, role, found)
    mode = machine.env.get("DYNAMICCL_MODE", DEFAULT_MODE)
    if role.name == "profiler" and mode == DEFAULT_MODE:
        return ok(
            name,
            f"{found.place}; it stays, and on NCCL 2.27, which tells a profiler alone which "
            "communicator it is, the tuner then leaves all to NCCL",
        )
    if found.origin is Origin.SWITCHED_OFF:
        return warn(name, found.place, f"take {role.variable} out, or start with dynamiccl-run")
    kept = machine.env.get(NEXT_TUNER)
    if mode != DEFAULT_MODE:
        advice = f"mode {mode} calls none but ours, so dynamiccl-run loads nothing beside this one"
    elif kept:
        return ok(name, f"{found.place}; asked before ours by {NEXT_TUNER}={kept}")
    else:
        advice = f"dynamiccl-run loads {VENDOR_NAME} in its place, which asks it before ours"
    return warn(name, found.place, advice)


def _ours(machine: Machine, role: Role, found: OtherPlugin) -> Check:
    """Check a configured library of ours, and whether it replaces another tuner unasked."""
    name = f"NCCL's {role.name}"
    theirs = find_displaced(machine, role)
    kept = machine.env.get(NEXT_TUNER) and Path(found.library).name == VENDOR_NAME
    if role.name == "tuner" and theirs is not None and not kept:
        return warn(
            name,
            f"ours, by {found.place}, in place of a tuner: {theirs.place}",
            f"start with dynamiccl-run without {role.variable}, which has it asked before ours",
        )
    return ok(name, f"ours, by {found.place}")


def check_settings(machine: Machine) -> Iterator[Check]:
    """Check NCCL settings that limit what tables can do."""
    settings = settings_of(machine)
    forced = [f"{name}={settings[name][0]}" for name in _BEATS_A_TUNER if name in settings]
    if forced:
        yield warn(
            "NCCL settings",
            ", ".join(forced),
            "they beat any tuner: where they rule out what a table says, NCCL's own choice stands",
        )
    policy = settings.get("NCCL_CTA_POLICY")
    if policy and is_efficiency_policy(policy[0]):
        yield warn(
            "CTA policy",
            f"NCCL_CTA_POLICY={policy[0]}",
            "with any tuner loaded, also one that abstains, NCCL skips this policy's choice of "
            "NVLS (2.30.7 src/enqueue.cc:2152; from 2.31 on src/tuning/tuning.cc): dynamiccl-run "
            "loads none",
        )
    enqueue = settings.get("NCCL_ENQUEUE_REARCH_ENABLE")
    if enqueue and is_new_enqueue(enqueue[0]):
        yield warn(
            "NCCL settings",
            f"NCCL_ENQUEUE_REARCH_ENABLE={enqueue[0]}",
            "from NCCL 2.31 on a tuner's cell then beats symmetric kernels that it is not shown "
            "(src/tuning/tuning.cc): every job here abstains",
        )


def check_artifact(
    machine: Machine, question: Question, libraries: list[NcclLibrary]
) -> Iterator[Check]:
    """Whether the artifact is valid, trusted by the plugin, and knows this machine."""
    artifact = question.artifact
    if artifact is None:
        yield unknown("artifact", "none named", "add ARTIFACT, or set DYNAMICCL_ARTIFACT")
        return
    try:
        opened = open_artifact(artifact)
    except DynamicclError as error:
        yield fail("artifact", str(error), "until then every job under it abstains")
        return
    yield ok("artifact", f"{artifact}: whole, {opened.index.sha256[:16]}")
    yield check_gate(opened)
    yield from check_channels(artifact, opened.tables, libraries)
    if (artifact / KILL_NAME).exists():
        yield warn("kill file", f"{artifact / KILL_NAME} is there", "remove it to use the tables")
    nccl = next((lib.path for lib in libraries if lib.version is not None), None)
    try:
        asked = ask_probe(machine, question.plugin, nccl=nccl, artifact=artifact)
    except PluginError as error:
        yield unknown("machine", str(error))
        return
    yield _machine_check(asked, artifact, knows_nccl=nccl is not None)


def check_gate(artifact: Artifact) -> Check:
    """Whether the artifact passed a gate, and whether its tables act anywhere."""
    if not artifact.is_gated:
        return warn("gate", artifact.in_short, "use 'dynamiccl-evaluate gate', and export that")
    if not any(info.acting for info in artifact.tables):
        advice = "jobs run as without it: fresh runs showed no gain, or too few were measured"
        return warn("gate", artifact.in_short, advice)
    return ok("gate", artifact.in_short)


def check_channels(
    artifact: Path, tables: list[TableInfo], libraries: list[NcclLibrary]
) -> Iterator[Check]:
    """Whether NCCL accepts the channel counts in the tables.

    From 2.31 on a tuner's number counts only below NCCL's own (`ncclTuningGetChannels`,
    `src/tuning/tuning_general.cc`).
    """
    newest = max((lib.version for lib in libraries if lib.version is not None), default=None)
    if newest is None or newest < CHANNELS_ARE_A_BOUND_SINCE:
        return
    counts = {
        f"{info.num_nodes} nodes, {info.num_ranks} ranks": int(
            (DecisionTable.read(artifact / info.path).entries["num_channels"] > 0).sum()
        )
        for info in tables
    }
    found = "; ".join(f"{count} entries for {shape}" for shape, count in counts.items() if count)
    if found:
        yield warn(
            "channels",
            f"the tables set a number of channels: {found}",
            f"NCCL {newest} takes one only where it is below its own: what asks for more runs with "
            "NCCL's number, so measure this release by itself (docs/plugin.md)",
        )


def _machine_check(asked: dict[str, Any], artifact: Path, *, knows_nccl: bool) -> Check:
    fingerprint = str(asked["fingerprint"])
    if "artifact_problem" in asked:
        return fail(
            "artifact",
            f"the plugin refuses {artifact}/plugin.index: {asked['artifact_problem']}",
            "it must belong to root or to who runs the job, and only the owner may write to it",
        )
    if asked["system"] is not None and fingerprint.startswith(_NO_GPU):
        return unknown(
            "machine",
            f"{fingerprint}: known, {asked['system']}; but no GPU is seen here",
            "run doctor where jobs run, e.g. srun -N1 --gpus=1 dynamiccl-deploy doctor ...",
        )
    if asked["system"] is not None:
        return ok("machine", f"{fingerprint}: known, {asked['system']}")
    if not knows_nccl:
        return unknown("machine", fingerprint, "the jobs' NCCL is not known: name it with --nccl")
    return fail(
        "machine",
        f"{fingerprint}: unknown to the artifact, so every job here abstains",
        "if its tables were measured on a machine like this: "
        f"dynamiccl-deploy bind {artifact} --system NAME",
    )


def check_key(machine: Machine) -> Check:
    """Check the shared secret of the job's messages, which several nodes need."""
    name = machine.env.get("DYNAMICCL_KEY_FILE", "")
    if not name:
        return ok(
            "key", "DYNAMICCL_KEY_FILE is not set; dynamiccl-run sets it, one node needs none"
        )
    try:
        found = Path(name).lstat()
    except OSError as error:
        return fail("key", f"{name}: {error.strerror}", "start jobs with dynamiccl-run")
    mode = stat.S_IMODE(found.st_mode)
    if not stat.S_ISREG(found.st_mode) or found.st_uid not in {0, os.geteuid()}:
        return fail("key", f"{name} is not a file of ours or root's", "a link does not count")
    if mode not in {0o600, 0o400}:
        return fail("key", f"{name} has mode {mode:04o}", f"chmod 600 {name}")
    if found.st_size < MIN_KEY_BYTES:
        return fail("key", f"{name} has {found.st_size} bytes", f"at least {MIN_KEY_BYTES}")
    return ok("key", name)


def _sampling(machine: Machine) -> Iterator[Check]:
    """The overhead of GPU timing, if any is configured."""
    if machine.env.get("DYNAMICCL_MODE", DEFAULT_MODE) == DEFAULT_MODE:
        return
    percent = machine.env.get("DYNAMICCL_SAMPLE_PERCENT", "1")
    found = f"GPU times are taken of {percent} % of calls"
    if percent == "0":
        yield ok("GPU times", "none are taken (DYNAMICCL_SAMPLE_PERCENT=0)")
        return
    yield ok(
        "GPU times",
        f"{found}, in bursts; a CUDA graph that is captured during one keeps its cost at every "
        "replay: jobs that capture graphs set DYNAMICCL_SAMPLE_PERCENT=0",
    )
