"""The manifest of a policy: how to feed it, and where its decisions are valid.

A policy directory has `policy.pt` and `manifest.json`, and where that policy was fitted to the test
part, too, `judged.pt`, which was not. `dynamiccl-deploy export` leaves it behind and adds `tables/`
and `plugin.index`, which makes it an artifact. The manifest lists the SHA-256 of all other files,
except the index (which holds the manifest's), the kill file and an A/B's verdict.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal, Self

import numpy as np
import polars as pl
from pydantic import TypeAdapter, ValidationError

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.cells import FAILED_WHERE, quiet, tuned, usable, with_trust
from dynamiccl.datasets.costs import COST_TYPES
from dynamiccl.datasets.features import ENVIRONMENT_COLUMNS
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.datasets.splits import Splits, with_split
from dynamiccl.datasets.store import config_of, file_sha256
from dynamiccl.errors import (
    ArtifactMismatch,
    CorruptFile,
    MissingPath,
    SchemaMismatch,
    UnknownName,
    UserError,
)
from dynamiccl.files import WRITING, replacing
from dynamiccl.libraries import with_nccl
from dynamiccl.nccl import NcclVersion

FORMAT_VERSION: Final = 2
MANIFEST_NAME: Final = "manifest.json"
POLICY_NAME: Final = "policy.pt"
JUDGED_NAME: Final = "judged.pt"
#: Policy, features and cold questions, for mode `adaptive`; without it only tables are served.
BRAIN_NAME: Final = "brain.pt"
TRIGGER_NAME: Final = "trigger.pt"
TRIGGER_FACTS_NAME: Final = "trigger.json"
GATE_NAME: Final = "gate.json"
#: What the plugin reads (serve/artifact.py); written last.
INDEX_NAME: Final = "plugin.index"
#: While it exists, jobs use NCCL's own choice.
KILL_NAME: Final = "kill"
AB_NAME: Final = "ab.json"  # the verdict of the newest A/B in a job (serve/ab.py)
_UNLISTED: Final = frozenset({MANIFEST_NAME, INDEX_NAME, KILL_NAME, AB_NAME})
POLICY_FOLDER: Final = "policy"
TRIGGER_FOLDER: Final = "trigger"
#: For a missing Trigger.
_FIX: Final = "give a run directory of 'dynamiccl-train trigger', or a policy that has one"

SHAPE_COLUMNS: Final = ("system", "num_nodes", "ranks_per_node", "launch_profile", "nccl_version")
#: Of one make: its group shapes differ.
_MAKE: Final = ("system", "launch_profile", "nccl_version")
#: Collective, nodes, ranks and size bin.
Place = tuple[str, int, int, int]
#: Config ("" for NCCL's own) -> share of its speed that compute loses during a call, the standard
#: error of that, and the call's time beside compute over that of NCCL's own choice.
Losses = dict[str, tuple[float, float, float]]


@dataclass(frozen=True, slots=True)
class JobTask:
    """A task in a job's trace, and what compute loses beside such calls."""

    place: Place
    #: Of NCCL's own choice alone, and how much longer the slowest rank's kernel waits.
    time_us: float
    skew_us: float
    #: From a call's begin until compute waits: the least of each part of the calls, ascending.
    compute_us: list[float]
    #: Products, such as `matmul 4096` -> their losses.
    losses: dict[str, Losses]


@dataclass(frozen=True, slots=True)
class Slack:
    """What a call may lose, so that compute keeps multiprocessors that channels would hold."""

    #: By which share a call may be longer than NCCL's own choice.
    share: float
    hidden: Literal["all"] | list[Place]
    #: Bound of every answer; None: NCCL's own choice alone bounds it.
    max_channels: int | None
    #: With tasks the objective is the job's step: a call may be longer by what compute gets back.
    job: list[JobTask] = field(default_factory=list)
    #: Most of its speed that compute loses to a channel, for tasks without `losses`.
    sm_price: float = 0.0

    @property
    def terms(self) -> str:
        """In words."""
        most = "" if self.max_channels is None else f", at most {self.max_channels} channels"
        if self.job:
            price = f" at up to {self.sm_price:.2%} a channel" if self.sm_price else ""
            return f"the time of the step, by {len(self.job)} tasks of a job{price}{most}"
        calls = "all calls" if self.hidden == "all" else f"the calls of {len(self.hidden)} tasks"
        return f"slack {self.share:.3g} on {calls}{most}"

    @property
    def promise(self) -> str:
        """What tables made with it promise, and what not."""
        if not self.hidden:
            return f"at most {self.max_channels} channels in every answer, where none is slower"
        longer = "as much longer as compute gets back" if self.job else f"{self.share:.1%} longer"
        if self.sm_price:
            longer += f", and {self.share:.1%} where that is not measured,"
        return (
            f"fewer channels ({self.terms}): a call may take {longer} than by NCCL's own choice. "
            "Never slower is said of the step here, not of the call: opt-in, to be proven in your "
            "job by A/B (dynamiccl-deploy ab)"
        )


@dataclass(frozen=True, slots=True)
class Support:
    """A system, group shape and launch profile that the policy was trained on."""

    system: str
    num_nodes: int
    ranks_per_node: int
    num_ranks: int
    launch_profile: str
    nccl_version: str | None
    gpu: str | None
    simulated: bool
    environment: dict[str, Any]
    #: Collective -> action -> size bins in which it was measured, ascending.
    measured: dict[str, dict[str, list[int]]]
    #: Collective -> noise band (unitless); absent = unknown.
    noise_bands: dict[str, float]
    #: Machines (dynamiccl/libraries.py); empty where the data do not say.
    fingerprints: list[str] = field(default_factory=list)
    #: None: never read back.
    most_channels: int | None = None
    #: As `measured`: the most channels of a config, the fewest of NCCL's own; null: not read back.
    channels: dict[str, dict[str, list[int | None]]] = field(default_factory=dict)
    #: Nothing was measured here: `measured` is of other shapes.
    carried: bool = False
    #: As `measured`, the size bins that passed the gate; None: no gate was asked.
    gated: dict[str, dict[str, list[int]]] | None = None
    #: Collective -> action -> the least size bin of no table: above the largest in which it worked.
    failed: dict[str, dict[str, int]] = field(default_factory=dict)

    def refused_from(self, collective: str, action: int) -> float:
        """The size bin from which on no table may hold it (`with_trust`); infinite: none."""
        return self.failed.get(collective, {}).get(str(action), np.inf)


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `manifest.json`."""

    recipe: str
    catalogue: list[dict[str, Any]]
    features: list[dict[str, str]]
    window_features: list[dict[str, str]]
    window_length: int
    launch_profiles: list[str]
    supports: list[Support]
    abstain_margin: float
    data_hash: str
    git_commit: str
    dynamiccl_version: str
    created: str
    knows_shapes: bool
    #: `system/sweep/run` of all data used, tests too: not fresh to a gate.
    runs: list[str] = field(default_factory=list)
    #: Of these runs (`run_digests`), the same rows under whatever name; empty: not known.
    digests: dict[str, str] = field(default_factory=dict)
    #: None: a table's config must be faster, call by call.
    slack: Slack | None = None
    parts: Splits = field(default_factory=Splits)
    #: Fitted to the test part, too: JUDGED_NAME is what test tasks judge.
    saw_test: bool = False
    trigger: dict[str, Any] | None = None
    #: `costs_beside` by column; None: not used.
    costs: dict[str, list[Any]] | None = None
    #: Relative path -> SHA-256 of every other file.
    files: dict[str, str] = field(default_factory=dict)
    format_version: int = FORMAT_VERSION

    def actions(self) -> Catalogue:
        """The configs by action."""
        return Catalogue(tuple(map(config_of, self.catalogue)))

    def noise_table(self) -> pl.DataFrame:
        """Noise bands by NOISE_KEY, as used in training."""
        rows = [
            {"system": s.system, "collective": collective, "noise_band": band}
            for s in self.supports
            for collective, band in s.noise_bands.items()
        ]
        types = {"system": pl.String, "collective": pl.String, "noise_band": pl.Float64}
        return pl.DataFrame(rows, schema=types).unique(maintain_order=True)

    def cost_table(self) -> pl.DataFrame | None:
        """NCCL's costs as `datasets.costs.read_costs` returns them; None if not used."""
        return None if self.costs is None else pl.DataFrame(self.costs, schema=COST_TYPES)

    def write(self, directory: Path) -> Self:
        """Write it, with hashes of all other files; returns what was written."""
        files = {name: file_sha256(directory / name) for name in _files_below(directory)}
        final = replace(self, files=files)
        text = json.dumps(asdict(final), indent=1) + "\n"
        with replacing(directory / MANIFEST_NAME) as hidden:
            hidden.write_text(text, encoding="utf-8")
        return final

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read and verify a policy directory.

        Raises MissingPath; CorruptFile when it is not JSON or lacks a field; SchemaMismatch for
        another format version; ArtifactMismatch when a listed file is missing or differs, or
        another is there.
        """
        manifest = cls.read_unchecked(directory)
        manifest._check_files(directory)
        return manifest

    @classmethod
    def read_unchecked(cls, directory: Path) -> Self:
        """As `read`, but without checking the listed files."""
        path = directory / MANIFEST_NAME
        if not path.is_file():
            raise MissingPath(
                "policy manifest", path, "give a run directory of dynamiccl-train or an artifact"
            )
        try:
            raw = json.loads(path.read_bytes())
            version = raw.get("format_version")
        except (ValueError, AttributeError) as error:
            raise CorruptFile(f"{path} is not a JSON object: {error}") from error
        if version != FORMAT_VERSION:
            raise SchemaMismatch(
                f"{path} has format version {version!r}, this release reads {FORMAT_VERSION}; "
                "train again with this release (dynamiccl-train fit) and export that, or use the "
                "release that made it"
            )
        try:
            manifest = TypeAdapter(cls).validate_python(raw)
            manifest.actions()
        except ValidationError as error:
            first = error.errors()[0]
            key = ".".join(str(part) for part in first["loc"])
            raise CorruptFile(f"{path}: {key}: {first['msg']}; export the policy again") from error
        except (KeyError, TypeError, UnknownName) as error:
            raise CorruptFile(
                f"{path}: its catalogue is not one of configs: {error}; export the policy again"
            ) from error
        return manifest

    def _check_files(self, directory: Path) -> None:
        for name, digest in self.files.items():
            path = directory / name
            if not path.is_file():
                raise ArtifactMismatch(f"{directory} lacks {name}, which its manifest lists")
            if file_sha256(path) != digest:
                raise ArtifactMismatch(
                    f"{path} is not the file that the manifest lists (SHA-256 differs); "
                    "export the artifact again"
                )
        extra = [name for name in _files_below(directory) if name not in self.files]
        if extra:
            raise ArtifactMismatch(
                f"{directory} holds {extra[0]}, which its manifest does not list; remove it, or "
                "export anew"
            )


def _files_below(directory: Path) -> list[str]:
    """The files that a manifest lists, sorted."""
    found = (path for path in directory.rglob("*") if not path.name.startswith(WRITING))
    files = (path for path in found if path.is_file())
    names = (str(path.relative_to(directory)) for path in files)
    return sorted(name for name in names if name not in _UNLISTED)


def find_policy_in(folder: Path) -> Path | None:
    """`folder` or, in a run's folder, its policy directory; None if neither."""
    for candidate in (folder, folder / POLICY_FOLDER):
        if (candidate / MANIFEST_NAME).is_file():
            return candidate
    return None


def trigger_file(path: Path) -> Path:
    """Path of the `trigger.pt` of a run, a policy, or a file; raises MissingPath."""
    folders = (path, path / TRIGGER_FOLDER, path / POLICY_FOLDER)
    found = [file for file in (path, *(each / TRIGGER_NAME for each in folders)) if file.is_file()]
    if not found:
        raise MissingPath("trigger", path / TRIGGER_NAME, _FIX)
    return found[0]


def trigger_facts(path: Path) -> dict[str, Any]:
    """What lies beside a `trigger.pt`; raises CorruptFile."""
    facts = path.with_name(TRIGGER_FACTS_NAME)
    try:
        found: dict[str, Any] = json.loads(facts.read_bytes())
    except (OSError, ValueError) as error:
        raise CorruptFile(f"{facts} cannot be read: {error}; {_FIX}") from error
    return found


def find_supports(frame: pl.DataFrame, catalogue: Catalogue, noise: pl.DataFrame) -> list[Support]:
    """One for each system, shape, launch profile and NCCL version of a measurements frame."""
    rows = with_trust(tuned(frame)).drop_nulls(["num_nodes", "ranks_per_node"])
    rows = with_split(rows.with_columns(catalogue.actions(rows)).drop_nulls("action"))
    bad, rows = rows.filter(~pl.col("is_trusted")), quiet(usable(rows)).filter("is_trusted")
    rows = rows.sort(SHAPE_COLUMNS)
    return [
        _support(dict(zip(SHAPE_COLUMNS, key, strict=True)), part, bad, noise)
        for key, part in rows.group_by(SHAPE_COLUMNS, maintain_order=True)
    ]


def _support(
    key: dict[str, Any], part: pl.DataFrame, bad: pl.DataFrame, noise: pl.DataFrame
) -> Support:
    facts = part.select(pl.col(name).drop_nulls().first() for name in ENVIRONMENT_COLUMNS)
    environment = facts.row(0, named=True)
    environment.pop("num_ranks")
    used = pl.col("actual_num_channels")
    used = pl.when(pl.col("action") == ABSTAIN_ACTION).then(used.min()).otherwise(used.max())
    bins = part.group_by("collective", "action", "bin").agg(used.first()).sort(pl.all())
    measured: dict[str, dict[str, list[int]]] = {}
    channels: dict[str, dict[str, list[int | None]]] = {}
    for collective, action, found, used_there in bins.iter_rows():
        measured.setdefault(collective, {}).setdefault(str(action), []).append(found)
        channels.setdefault(collective, {}).setdefault(str(action), []).append(used_there)
    gpus = part["gpu"].drop_nulls().unique().sort().to_list()
    bad = bad.filter(pl.col(name).eq_missing(key[name]) for name in FAILED_WHERE if name in key)
    failed = dict[str, dict[str, int]]()
    for collective, action, first in (
        bad.group_by("collective", "action").agg(pl.col("bin").min()).sort(pl.all()).iter_rows()
    ):
        worked = measured.get(collective, {}).get(str(action), [])
        failed.setdefault(collective, {})[str(action)] = min(first, max(worked, default=-1) + 1)
    return Support(
        **key,
        num_ranks=key["num_nodes"] * key["ranks_per_node"],
        gpu=gpus[0] if gpus else None,
        simulated=bool((part["source"] == "simulator").all()),
        environment=environment,
        measured=measured,
        most_channels=part.select(pl.col("actual_num_channels").max()).item(),
        channels=channels,
        failed=failed,
        fingerprints=_fingerprints(part, key["nccl_version"]),
        noise_bands=dict(
            noise.filter(pl.col("system") == key["system"])
            .select("collective", "noise_band")
            .iter_rows()
        ),
    )


def costs_beside(costs: pl.DataFrame, supports: Sequence[Support]) -> pl.DataFrame:
    """Rows of the supports' systems, profiles and releases; of shapes that nobody measured, too."""
    types = {name: costs.schema[name] for name in _MAKE}
    known = pl.DataFrame([{name: getattr(s, name) for name in _MAKE} for s in supports], types)
    return costs.join(known, on=_MAKE, how="semi", nulls_equal=True)


def _fingerprints(part: pl.DataFrame, nccl_version: str | None) -> list[str]:
    if nccl_version is None:
        return []
    measured = part.filter(pl.col("source") != "simulator")["node_fingerprint"]
    version = NcclVersion.parse(nccl_version)
    return [with_nccl(node, version) for node in measured.drop_nulls().unique().sort()]


def with_shape(manifest: Manifest, num_nodes: int, ranks_per_node: int) -> Manifest:
    """The manifest with a support of this shape added for each system and NCCL release.

    Channels and chunks are left to NCCL. Raises UserError for a measured shape, a gated policy (its
    evidence is of measured shapes), and one that does not know how sure it is of new shapes.
    """
    asked = f"{num_nodes}x{ranks_per_node}"
    if not manifest.knows_shapes:
        raise UserError(
            f"the policy ({manifest.recipe}) does not say how sure it is of a shape that nobody "
            f"measured, and knows nothing of {asked}: train recipe gaussian-process, or measure it"
        )
    if any(support.gated is not None for support in manifest.supports):
        raise UserError(
            f"the policy passed a gate for the shapes that were measured, and {asked} is none of "
            "them: export the run before the gate, or measure that shape"
        )
    known = [s for s in manifest.supports if s.launch_profile == DEFAULT_PROFILE]
    if any((s.num_nodes, s.ranks_per_node) == (num_nodes, ranks_per_node) for s in known):
        raise UserError(f"{asked} was measured, and has its table: leave out --group {asked}")
    makes = dict.fromkeys(tuple(getattr(s, name) for name in _MAKE) for s in known)
    found = [_carried(manifest, make, num_nodes, ranks_per_node) for make in makes]
    return replace(manifest, supports=[*manifest.supports, *found])


def _least_failed(supports: Sequence[Support]) -> dict[str, dict[str, int]]:
    """`failed` of all of them."""
    found = dict[str, dict[str, int]]()
    for support in supports:
        for collective, failed in support.failed.items():
            of_all = found.setdefault(collective, {})
            for action, first in failed.items():
                of_all[action] = min(first, of_all.get(action, first))
    return found


def _carried(
    manifest: Manifest, make: tuple[Any, ...], num_nodes: int, ranks_per_node: int
) -> Support:
    measured = [s for s in manifest.supports if tuple(getattr(s, n) for n in _MAKE) == make]
    # Under any release.
    here = measured[0].system, measured[0].launch_profile
    failed = _least_failed([s for s in manifest.supports if (s.system, s.launch_profile) == here])
    configs = manifest.actions().configs
    bins: dict[str, dict[str, set[int]]] = {}
    for support in measured:
        for collective, actions in support.measured.items():
            for action, found in actions.items():
                config = configs[int(action)]
                first = failed.get(collective, {}).get(action, np.inf)
                kept = [each for each in found if each < first]
                if kept and config.num_channels is None and config.chunk_bytes is None:
                    bins.setdefault(collective, {}).setdefault(action, set()).update(kept)
    return replace(
        measured[0],
        num_nodes=num_nodes,
        ranks_per_node=ranks_per_node,
        num_ranks=num_nodes * ranks_per_node,
        measured={c: {a: sorted(b) for a, b in each.items()} for c, each in bins.items()},
        most_channels=None,
        channels={},
        carried=True,
        failed=failed,
    )
