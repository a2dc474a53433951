"""Loads a sweep file and lays out its trials.

A sweep is TOML, checked by Pydantic: an unknown key, a wrong value or a name that NCCL does not
know ends in one line that names the key, the value and the choices. The grid is collectives x group
shapes x datatypes x launch profiles x interference x sizes x (NCCL's default + algorithms x
protocols x channels x chunk sizes), or what `only` names of it; combinations that NCCL cannot run
are trials too, with the reason, so that nothing is a silent gap.
"""

import tomllib
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from dynamiccl.collect.sweep.group_shape import GroupShape
from dynamiccl.collect.sweep.only import Task, only_of
from dynamiccl.collect.sweep.settings import TABLES, SweepFile
from dynamiccl.collect.sweep.trial import Interference, LaunchProfile, Setting, Trial
from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import DynamicclError, InvalidSweep, MissingPath
from dynamiccl.nccl import (
    ABSTAIN,
    NEWEST_KNOWN,
    Algorithm,
    Collective,
    Config,
    NcclVersion,
    Protocol,
    invalid_reason,
)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A checked sweep: its settings and its trials, in declaration order."""

    file: SweepFile
    text: str
    trials: tuple[Trial, ...]


def load_sweep(path: Path) -> Sweep:
    """Read and check a sweep file. Raises MissingPath and InvalidSweep."""
    if not path.is_file():
        raise MissingPath("sweep file", path, "examples/ holds some to start from")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InvalidSweep(f"{path.name} is not TOML: {error}") from error
    return parse_sweep(text, where=path.name)


def parse_sweep(text: str, *, where: str) -> Sweep:
    """Check the text of a sweep file and lay out its trials. Raises InvalidSweep."""
    try:
        file = SweepFile.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise InvalidSweep(f"{where} is not TOML: {error}") from error
    except ValidationError as error:
        raise InvalidSweep(_explain(error, where)) from error
    try:
        check_slug(file.name, "sweep")
        check_slug(file.system, "system")
        trials = _trials(file, where)
    except InvalidSweep:
        raise
    except DynamicclError as error:
        raise InvalidSweep(str(error)) from error
    return Sweep(file, text, trials)


def _explain(error: ValidationError, where: str) -> str:
    errors = error.errors()
    # A misspelt key is why its right spelling is missing: say the cause.
    first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
    key = ".".join(str(part) for part in first["loc"]) or "the file"
    message = f"{where}: {key}: {first['msg']}"
    if first["type"] == "extra_forbidden":
        tables = [TABLES[part] for part in map(str, first["loc"][:-1]) if part in TABLES]
        table = tables[-1] if tables else SweepFile
        return f"{message}; known keys are {', '.join(table.model_fields)}"
    if first["type"] == "missing":
        return f"{message}; add it"
    return f"{message} (got {first['input']!r})"


def _trials(file: SweepFile, where: str) -> tuple[Trial, ...]:
    configs = _configs(file, where)
    version = _version(file, where)
    wanted = only_of(file, where=where)
    trials = tuple(
        Trial(setting, size, config, _infeasible(setting, size, config, version))
        for setting in settings_of(file, where=where)
        for size in file.sizes.ladder()
        for config in (configs if setting.collective.tunable else [ABSTAIN])
        if wanted is None or config in wanted.get(Task.of(setting, size), ())
    )
    for key, count in Counter(trial.key for trial in trials).items():
        if count > 1:
            raise InvalidSweep(
                f"{where}: trial {key} is declared twice; name every collective, group, datatype, "
                "profile, interference, algorithm, protocol, channel count and chunk size once"
            )
    return trials


def _version(file: SweepFile, where: str) -> NcclVersion | None:
    if file.nccl_version is None:
        return None
    version = NcclVersion.parse(file.nccl_version)
    if (version.major, version.minor) > (NEWEST_KNOWN.major, NEWEST_KNOWN.minor):
        raise InvalidSweep(
            f"{where}: nccl_version: NCCL {version} is newer than the newest whose rules are known "
            f"here, {NEWEST_KNOWN.major}.{NEWEST_KNOWN.minor}; leave the key out, and what runs is "
            "read from NCCL's log"
        )
    return version


def _infeasible(
    setting: Setting, size_bytes: int, config: Config, version: NcclVersion | None
) -> str | None:
    ranks = setting.num_ranks
    if setting.benchmark_bytes(size_bytes) == 0:
        return f"{size_bytes} bytes leave nothing to each of {ranks} ranks"
    return invalid_reason(config, setting.collective, version=version, num_nodes=setting.num_nodes)


def settings_of(file: SweepFile, *, where: str) -> list[Setting]:
    """Every setting of a sweep, in declaration order. Raises UnknownName for a collective."""
    collectives = [Collective.parse(c, where=f"{where}: collectives") for c in file.collectives]
    profiles = [
        LaunchProfile(profile.name, tuple(sorted(profile.environment().items())))
        for profile in file.profiles
    ]
    for profile in profiles:
        check_slug(profile.name, "profile")
    return [
        Setting(
            collective,
            *_shape(group),
            datatype,
            profile,
            Interference(beside.kind, beside.level),
            **_launched(group),
        )
        for collective in collectives
        for group in file.groups
        for datatype in file.datatypes
        for profile in profiles
        for beside in file.interference
    ]


def _shape(group: GroupShape) -> tuple[int, int]:
    """Nodes and ranks per node of a communicator."""
    comms = group.comms()
    if comms is None:
        return group.num_nodes, group.ranks_per_node
    return comms.num_nodes, comms.ranks_per_node


def _launched(group: GroupShape) -> dict[str, Any]:
    """Fields of a setting that describe the job: hosts, and communicators at the same time."""
    if group.split is None:
        return {"num_hosts": group.num_hosts or 0}
    return {
        "num_hosts": group.num_nodes,
        "split": group.split,
        "spare": group.spare,
        "num_processes": group.num_nodes * group.ranks_per_node,
    }


def _configs(file: SweepFile, where: str) -> list[Config]:
    algorithms = [Algorithm.parse(a, where=f"{where}: algorithms") for a in file.algorithms]
    protocols = [Protocol.parse(p, where=f"{where}: protocols") for p in file.protocols]
    channels = [count or None for count in file.num_channels]
    chunks = [size or None for size in file.chunk_sizes]
    forced = [
        Config(a, p, n, c) for a in algorithms for p in protocols for n in channels for c in chunks
    ]
    return [ABSTAIN, *forced]
