"""The artifact: a policy directory with decision tables for the plugin, and its verification.

policy.pt       TorchScript: window, context, mask -> action, q values
brain.pt        TorchScript: recorded calls -> table entries, for the leader of a job; holds the
                policy, and the Trigger where there is one
gate.json       what a gate saw of every size bin in which the policy acts
manifest.json   features, catalogue, supports, hashes (datasets/manifest.py)
tables/         integer decision tables, one a system and communicator shape
plugin.index    what the plugin reads

The plugin has no JSON reader and no torch. Its index has lines of fields between tabs:

    dynamiccl-index   1
    artifact          SHA-256 of manifest.json
    system            NAME   fingerprint               one line a machine (dynamiccl/libraries.py)
    noise             NAME   number of the collective   parts per million by which repeats differ
    table             NAME   num_nodes   num_ranks      SHA-256 of the .dct file

At most 64 KiB; serve/plugin/prepare/prepare.cpp reads it. Made last, it is not in the manifest; its
SHA-256 stands for the whole artifact when ranks compare theirs.
"""

import hashlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Final, Self

import typer

from dynamiccl.datasets.features import feature_table, window_table
from dynamiccl.datasets.history import WINDOW_LENGTH
from dynamiccl.datasets.manifest import INDEX_NAME, MANIFEST_NAME, Manifest, Support
from dynamiccl.datasets.questions import CHANNELS_UNREAD, cold_questions, table_supports
from dynamiccl.datasets.store import file_sha256
from dynamiccl.errors import ArtifactMismatch, CorruptFile, UnknownName, UserError
from dynamiccl.files import replacing
from dynamiccl.libraries import TUNER_NAME, check_fingerprint
from dynamiccl.nccl import Collective
from dynamiccl.serve.table import DecisionTable, relative_path
from dynamiccl.train.options import stderr, tell

INDEX_VERSION: Final = 1
MAX_BYTES: Final = 1 << 16
MAX_NOISE_PPM: Final = 10**9
_log = logging.getLogger(__name__)
System = Annotated[str | None, typer.Option(help="System, where several have this shape.")]
Group = Annotated[
    str, typer.Option(metavar="NODESxRANKS", help="Communicator: NCCL's nNodes, ranks of each.")
]
Nccl = Annotated[
    Path | None, typer.Option(help="The jobs' libnccl.so.2; default: what is found here.")
]
ArtifactDir = Annotated[Path, typer.Argument(metavar="ARTIFACT", help="Artifact directory.")]


def warn(text: str) -> None:
    """Print a warning on stderr."""
    tell(stderr, f"warning: {text}")


@dataclass(frozen=True, slots=True)
class PluginIndex:
    """The content of plugin.index."""

    manifest_sha256: str
    #: Fingerprint -> system.
    systems: Mapping[str, str]
    noise_ppm: Mapping[tuple[str, Collective], int]
    #: (system, num_nodes, num_ranks) -> SHA-256.
    tables: Mapping[tuple[str, int, int], str]

    @classmethod
    def of_artifact(cls, directory: Path, supports: Sequence[Support]) -> Self:
        """The index of an artifact whose manifest and tables are written."""
        shapes = [(s.system, s.num_nodes, s.num_ranks) for s in supports]
        return cls(
            file_sha256(directory / MANIFEST_NAME),
            known_machines(supports),
            {
                (support.system, Collective.parse(name)): round(band * 1e6)
                for support in supports
                for name, band in support.noise_bands.items()
                if 0 <= band * 1e6 <= MAX_NOISE_PPM  # not NaN
            },
            {key: file_sha256(directory / relative_path(*key)) for key in shapes},
        )

    @classmethod
    def read(cls, directory: Path) -> Self:
        """Read an index; raises ArtifactMismatch where there is none, and CorruptFile."""
        path = directory / INDEX_NAME
        if not path.is_file():
            raise ArtifactMismatch(
                f"{directory} has no {INDEX_NAME}, without which the plugin uses nothing of it; "
                "export the artifact again"
            )
        data = path.read_bytes()
        try:
            lines = [line.split("\t") for line in data.decode().removesuffix("\n").split("\n")]
            index = cls(
                next(fields[1] for fields in lines if fields[0] == "artifact"),
                {f[2]: f[1] for f in lines if f[0] == "system"},
                {(f[1], Collective(int(f[2]))): int(f[3]) for f in lines if f[0] == "noise"},
                {(f[1], int(f[2]), int(f[3])): f[4] for f in lines if f[0] == "table"},
            )
            # One artifact, one text: any other was not written by us.
            sound = bool(index.tables) and index.to_bytes() == data
        except (ValueError, IndexError, StopIteration, UserError):
            sound = False
        if not sound:
            raise CorruptFile(f"{path} is not a usable index; export the artifact again")
        return index

    def write(self, directory: Path) -> None:
        """Write the index, replacing the one there."""
        with replacing(directory / INDEX_NAME) as hidden:
            hidden.write_bytes(self.to_bytes())

    def to_bytes(self) -> bytes:
        """The file's bytes; raises UserError when the plugin would refuse them."""
        data = "".join("\t".join(fields) + "\n" for fields in self._lines()).encode()
        if len(data) > MAX_BYTES:
            raise UserError(
                f"an index of {len(data)} bytes is more than the plugin reads ({MAX_BYTES} bytes); "
                "train on fewer systems or shapes"
            )
        return data

    def _lines(self) -> Iterator[tuple[str, ...]]:
        yield "dynamiccl-index", str(INDEX_VERSION)
        yield "artifact", self.manifest_sha256
        for fingerprint, system in sorted(self.systems.items(), key=lambda item: item[::-1]):
            yield "system", system, check_fingerprint(fingerprint)
        for (system, collective), ppm in sorted(self.noise_ppm.items()):
            yield "noise", system, str(int(collective)), str(ppm)
        for (system, num_nodes, num_ranks), digest in sorted(self.tables.items()):
            yield "table", system, str(num_nodes), str(num_ranks), digest

    @property
    def sha256(self) -> str:
        """The artifact's identity, which ranks compare."""
        return hashlib.sha256(self.to_bytes()).hexdigest()

    @property
    def system_names(self) -> list[str]:
        """Systems that have tables, sorted."""
        return sorted({system for system, _, _ in self.tables})

    def machines_of(self, system: str) -> list[str]:
        """A system's fingerprints, sorted."""
        return sorted(text for text, name in self.systems.items() if name == system)

    def bound(self, system: str, fingerprint: str) -> Self:
        """With a machine added, or moved to another system; raises UserError."""
        return replace(self, systems={**self.systems, check_fingerprint(fingerprint): system})


def known_machines(supports: Sequence[Support]) -> dict[str, str]:
    """Fingerprint -> system, of machines on which each of its tables was measured."""
    known = {}
    for fingerprint in sorted({each for support in supports for each in support.fingerprints}):
        others = {s.system for s in supports if fingerprint not in s.fingerprints}
        systems = sorted({s.system for s in supports} - others)
        if len(systems) == 1:
            known[fingerprint] = systems[0]
        elif systems:
            _log.warning(
                "systems %s are the same kind of machine, so jobs there will abstain; choose one "
                "with 'dynamiccl-deploy bind ARTIFACT --system NAME --fingerprint \"%s\"'",
                ", ".join(systems),
                fingerprint,
            )
    return known


@dataclass(frozen=True, slots=True)
class TableInfo:
    """One decision table of an artifact."""

    system: str
    num_nodes: int
    num_ranks: int
    path: str
    entries: int
    acting: int
    #: Abstaining bins where NCCL's own choice takes more channels than answers may.
    beyond: int


@dataclass(frozen=True, slots=True)
class Artifact:
    """A verified artifact."""

    directory: Path
    manifest: Manifest
    tables: list[TableInfo]
    index: PluginIndex

    @property
    def is_gated(self) -> bool:
        """Whether a gate judged the policy; then only bins that passed act."""
        return all(support.gated is not None for support in self.manifest.supports)

    @property
    def in_short(self) -> str:
        """Gated or not, and how much of the tables acts, in a line."""
        acting = sum(info.acting for info in self.tables)
        entries = sum(info.entries for info in self.tables)
        word = "gated" if self.is_gated else "NOT gated"
        bins = f"in {acting} of {entries} size bins, NCCL's own choice stands elsewhere"
        if self.manifest.slack is not None:
            beyond = sum(info.beyond for info in self.tables)
            if beyond:
                bins += f", in {beyond} or more with more channels than answers may take"
            bins += f"; {self.manifest.slack.promise}"
        if acting and not self.index.systems:
            return f"{word}; acts on no machine yet (dynamiccl-deploy bind); on one, {bins}"
        return f"{word}; acts {bins}"

    @property
    def warnings(self) -> list[tuple[str, str]]:
        """Why jobs may run as without it, and what to do."""
        found = []
        if not any(info.acting for info in self.tables):
            why = "no gain was shown, or too little was measured: measure more, and gate that"
            why = channels_unread(self.manifest) or why
            found.append(("its tables act at no size: every job keeps NCCL's own choice", why))
        for name in self.index.system_names:
            found += acts_nowhere(self.directory, name)
        return found

    def pick(
        self, num_nodes: int, num_ranks: int, system: str | None
    ) -> tuple[Support, DecisionTable]:
        """What is known of a shape, and its table; raises as `pick_support`."""
        support = pick_support(self.manifest, num_nodes, num_ranks, system)
        path = relative_path(support.system, num_nodes, num_ranks)
        return support, DecisionTable.read(self.directory / path)

    def refuse_slack(self, why: str) -> None:
        """Raise UserError for an artifact with slack: only its tables keep to it."""
        if slack := self.manifest.slack:
            where = f"{self.directory} has {slack.terms}"
            raise UserError(f"{where}, {why}: leave its tables as they are")

    def to_json(self) -> dict[str, Any]:
        """Plain data for `json.dumps`."""
        return {
            "artifact": str(self.directory),
            "gated": self.is_gated,
            "slack": None if self.manifest.slack is None else asdict(self.manifest.slack),
            "promise": None if self.manifest.slack is None else self.manifest.slack.promise,
            "warnings": [what for what, _ in self.warnings],
            "recipe": self.manifest.recipe,
            "data_hash": self.manifest.data_hash,
            "git_commit": self.manifest.git_commit,
            "actions": len(self.manifest.catalogue),
            "sha256": self.index.sha256,
            "trigger": self.manifest.trigger,
            "machines": {name: self.index.machines_of(name) for name in self.index.system_names},
            "tables": [asdict(info) for info in self.tables],
        }


def installed_plugin(artifact_dir: Path) -> Path | None:
    """The plugin installed with an artifact; None: it is no installation."""
    found = artifact_dir.absolute().parent / "lib" / TUNER_NAME
    return found if found.is_file() else None


def how_to_bind(artifact_dir: Path, system: str = "NAME") -> str:
    """Commands to bind a system here; an installed artifact stays, for jobs hold its hash."""
    plugin = installed_plugin(artifact_dir)
    if plugin is None:
        return f"dynamiccl-deploy bind {artifact_dir} --system {system}"
    return (
        f"dynamiccl-deploy bind EXPORTED --system {system} (the directory that 'export' wrote), "
        f"and install it again: dynamiccl-deploy install EXPORTED --to {plugin.parents[1]}"
    )


def acts_nowhere(artifact_dir: Path, system: str) -> list[tuple[str, str]]:
    """What is so, and what to do, where no machine is bound to a system."""
    if PluginIndex.read(artifact_dir).machines_of(system):
        return []
    advice = f"on a node like those of the data: {how_to_bind(artifact_dir, system)}"
    return [(f"no machine is bound to {system}: its tables act nowhere", advice)]


def open_artifact(directory: Path) -> Artifact:
    """Verify without torch; raises as `Manifest.read`, CorruptFile and ArtifactMismatch."""
    manifest = Manifest.read(directory)
    check_features(manifest, directory)
    supports, tables = table_supports(manifest), []
    for support in supports:
        shape = support.system, support.num_nodes, support.num_ranks
        name = relative_path(*shape)
        acts, beyond = DecisionTable.read(directory / name).entries["act"] > 0, 0
        if manifest.slack is not None and manifest.slack.max_channels is not None:
            rule = cold_questions(manifest, support).rule
            beyond = int(((rule.channels[:, 0] > rule.most) & ~acts.ravel()).sum())
        tables.append(TableInfo(*shape, name, acts.size, int(acts.sum()), beyond))
    index = PluginIndex.read(directory)
    if replace(PluginIndex.of_artifact(directory, supports), systems=index.systems) != index:
        raise ArtifactMismatch(
            f"{directory / INDEX_NAME} is not of the manifest and files beside it; export the "
            "artifact again"
        )
    return Artifact(directory, manifest, tables, index)


def pick_support(manifest: Manifest, num_nodes: int, num_ranks: int, system: str | None) -> Support:
    """That of a shape; raises UnknownName, and UserError where systems share the shape."""
    supports, shape = table_supports(manifest), (num_nodes, num_ranks)
    shaped = {s.system: s for s in supports if (s.num_nodes, s.num_ranks) == shape}
    if not shaped:
        shapes = {f"{s.num_nodes}x{s.ranks_per_node}" for s in supports}
        asked = f"{num_ranks} ranks on {num_nodes} nodes"
        raise UnknownName("communicator shape", asked, sorted(shapes))
    if system is None and len(shaped) > 1:
        names = ", ".join(shaped)
        raise UserError(f"{len(shaped)} systems have this shape; add --system, one of {names}")
    chosen = system or next(iter(shaped))
    if chosen not in shaped:
        raise UnknownName("system", chosen, list(shaped))
    return shaped[chosen]


def channels_unread(manifest: Manifest, system: str | None = None) -> str:
    """Which configs tables may not hold, for NCCL's own channels are not known; "": none."""
    configs = manifest.actions().configs[1:]
    asking = sum(config.num_channels is not None for config in configs)
    supports = [s for s in table_supports(manifest) if system in {None, s.system}]
    shapes = {f"{s.num_nodes}x{s.ranks_per_node}" for s in supports if s.most_channels is None}
    if not asking or not shapes:
        return ""
    which = f"{asking} of {len(configs)} configs, which ask for channels"
    return f"{', '.join(sorted(shapes))}: tables may not hold {which}; {CHANNELS_UNREAD}"


def check_features(manifest: Manifest, where: Path) -> None:
    """Raise ArtifactMismatch for a policy that learned on another release's features."""
    costs = manifest.cost_table() is not None
    context = feature_table(manifest.launch_profiles, costs=costs)
    wanted = (context, window_table(), WINDOW_LENGTH)
    if (manifest.features, manifest.window_features, manifest.window_length) != wanted:
        raise ArtifactMismatch(
            f"the features that {where} was trained on are not those of this release; train again"
        )
