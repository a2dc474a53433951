"""The artifact: a policy directory with decision tables for the plugin, and its verification.

policy.pt       TorchScript: window, context, mask -> action, q values
brain.pt        TorchScript: recorded calls -> table entries, for the leader of a job; the
                policy is in it, and the Trigger where there is one
gate.json       what a gate saw of every size bin in which the policy acts; where one judged it
manifest.json   features, catalogue, supports, hashes (datasets/manifest.py)
tables/         integer decision tables, one a system and communicator shape
plugin.index    what the plugin reads: table hashes, known machines (serve/plugin_index.py)
"""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dynamiccl.datasets.features import feature_table, window_table
from dynamiccl.datasets.history import WINDOW_LENGTH
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.questions import (
    cold_questions,
    count_of,
    read_back_channels,
    table_supports,
)
from dynamiccl.errors import ArtifactMismatch, UnknownName, UserError
from dynamiccl.libraries import TUNER_NAME
from dynamiccl.nccl import ABSTAIN, Collective, Config
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.table import DecisionTable, relative_path


@dataclass(frozen=True, slots=True)
class TableInfo:
    """One decision table of an artifact."""

    system: str
    num_nodes: int
    num_ranks: int
    path: str
    entries: int
    #: Entries that tell NCCL something; the others abstain.
    acting: int
    #: Size bins that abstain though NCCL's own choice takes more channels than answers may.
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
        """One line: gated or not, and how much of the tables acts."""
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
            # What to bind, and on which node, is in the warnings.
            return f"{word}; acts on no machine yet (dynamiccl-deploy bind); on one, {bins}"
        return f"{word}; acts {bins}"

    @property
    def warnings(self) -> list[tuple[str, str]]:
        """Why jobs under it may run as without it: what is so, and what to do."""
        found = []
        if not any(info.acting for info in self.tables):
            why = "no gain was shown, or too little was measured: measure more, and gate that"
            found.append(("its tables act at no size: every job keeps NCCL's own choice", why))
        for name in self.index.system_names:
            found += acts_nowhere(self.directory, name, self.index)
        return found

    def refuse_slack(self, why: str) -> None:
        """Raise UserError for an artifact with slack: its tables alone keep to it."""
        if slack := self.manifest.slack:
            where = f"{self.directory} has {slack.terms}"
            raise UserError(f"{where}, {why}: leave its tables as they are")

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data for `json.dumps`."""
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
            "tables": [
                {name: getattr(info, name) for name in TableInfo.__slots__} for info in self.tables
            ],
        }


def installed_plugin(artifact_dir: Path) -> Path | None:
    """The plugin that was installed with an artifact; None if it is no installation."""
    found = artifact_dir.absolute().parent / "lib" / TUNER_NAME
    return found if found.is_file() else None


def how_to_bind(artifact_dir: Path, system: str = "NAME") -> str:
    """The commands that let an artifact's tables of a system act on a machine like this.

    An installed one is left as it is: the next `install` would undo it, and jobs hold its hash.
    """
    plugin = installed_plugin(artifact_dir)
    if plugin is None:
        return f"dynamiccl-deploy bind {artifact_dir} --system {system}"
    return (
        f"dynamiccl-deploy bind EXPORTED --system {system} (the directory that 'export' wrote), "
        f"and install it again: dynamiccl-deploy install EXPORTED --to {plugin.parents[1]}"
    )


def acts_nowhere(
    artifact_dir: Path, system: str, index: PluginIndex | None = None
) -> list[tuple[str, str]]:
    """What is so, and what to do, where no machine is bound to a system of an artifact.

    `index` is the artifact's, where it is read already.
    """
    if (index or PluginIndex.read(artifact_dir)).machines_of(system):
        return []
    advice = f"on a node like those of the data: {how_to_bind(artifact_dir, system)}"
    return [(f"no machine is bound to {system}: its tables act nowhere", advice)]


def open_artifact(directory: Path) -> Artifact:
    """Verify hashes, features and tables; needs no torch.

    Raises what `Manifest.read` raises, CorruptFile, and ArtifactMismatch.
    """
    manifest = Manifest.read(directory)
    check_features(manifest, directory)
    supports, tables = table_supports(manifest), []
    for support in supports:
        shape = support.system, support.num_nodes, support.num_ranks
        path = relative_path(*shape)
        if not (directory / path).is_file():
            raise ArtifactMismatch(
                f"{directory} has no {path}; it is a policy, not yet an artifact"
            )
        acts, beyond = DecisionTable.read(directory / path).entries["act"] > 0, 0
        if manifest.slack is not None and manifest.slack.max_channels is not None:
            rule = cold_questions(manifest, support).rule
            beyond = int(((rule.channels[:, 0] > rule.most) & ~acts.ravel()).sum())
        tables.append(TableInfo(*shape, path, acts.size, int(acts.sum()), beyond))
    index = PluginIndex.read(directory)
    index.check_against(PluginIndex.of_artifact(directory, supports), directory)
    return Artifact(directory, manifest, tables, index)


def channels_of(
    artifact: Artifact, info: TableInfo, collective: Collective, index: int, config: Config | None
) -> dict[str, int | None]:
    """`channels` of a table's answer and `own_channels` of NCCL's choice; None: not read back."""
    support = table_supports(artifact.manifest)[artifact.tables.index(info)]
    [used] = read_back_channels(artifact.manifest, support, collective, [index])
    action = artifact.manifest.actions().index(config or ABSTAIN)
    return {"channels": count_of(used[action]), "own_channels": count_of(used[0])}


def pick_table(artifact: Artifact, num_nodes: int, num_ranks: int, system: str | None) -> TableInfo:
    """The table of a communicator shape.

    Raises UnknownName (no such shape or system) and UserError (several systems have that shape).
    """
    shape = num_nodes, num_ranks
    shaped = {t.system: t for t in artifact.tables if (t.num_nodes, t.num_ranks) == shape}
    if not shaped:
        shapes = {f"--ranks {t.num_ranks} --nodes {t.num_nodes}" for t in artifact.tables}
        asked = f"--ranks {num_ranks} --nodes {num_nodes}"
        raise UnknownName("communicator shape", asked, sorted(shapes))
    if system is None and len(shaped) > 1:
        names = ", ".join(shaped)
        raise UserError(f"{len(shaped)} systems have this shape; add --system, one of {names}")
    chosen = system or next(iter(shaped))
    if chosen not in shaped:
        raise UnknownName("system", chosen, list(shaped))
    return shaped[chosen]


def check_features(manifest: Manifest, where: Path) -> None:
    """Raise ArtifactMismatch for a policy that learned on the features of another release."""
    costs = manifest.cost_table() is not None
    context = feature_table(manifest.launch_profiles, costs=costs)
    wanted = (context, window_table(), WINDOW_LENGTH)
    if (manifest.features, manifest.window_features, manifest.window_length) != wanted:
        raise ArtifactMismatch(
            f"the features that {where} was trained on are not those of this release; train again"
        )
