"""Export, verify and use an artifact: one observation through policy, TorchScript and plugin."""

import copy
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.features import TUNED, cold_observations
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.questions import allowed, cold_tasks, table_supports
from dynamiccl.errors import ArtifactMismatch, SchemaMismatch, UnknownName
from dynamiccl.nccl import Collective
from dynamiccl.serve.artifact import Artifact, pick_table
from dynamiccl.serve.decisions import nccl_csv
from dynamiccl.serve.export import export_artifact, verify_artifact
from dynamiccl.serve.plugin_index import PluginIndex
from dynamiccl.serve.table import DecisionTable
from dynamiccl.simulator.h100 import default_model
from dynamiccl.simulator.system import Call, Group
from dynamiccl.sizes import bin_center_bytes, bin_first_byte, size_bin
from dynamiccl.train.policy import TorchPolicy
from tests.conftest import Trained
from tests.data_sets import SYSTEM
from tests.serve.abi import TunerPlugin, loopback_environment

GROUP = Group(4, 8)
TABLE = f"tables/{SYSTEM}/nodes4_ranks32.dct"


@pytest.fixture(scope="module")
def artifact(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return export_artifact(trained.policy, tmp_path_factory.mktemp("export") / "artifact")


@pytest.fixture
def copied(artifact: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(artifact.directory, tmp_path / "copy"))


def test_artifact_holds_policy_manifest_and_a_table(artifact: Artifact) -> None:
    assert [info.path for info in artifact.tables] == [TABLE]
    assert artifact.tables[0].acting > 0
    assert set(artifact.manifest.files) == {"policy.pt", "brain.pt", TABLE}
    assert artifact.to_json()["tables"][0]["system"] == SYSTEM


def test_one_cold_observation_means_the_same_in_policy_table_and_plugin(
    trained: Trained, artifact: Artifact, plugin_path: Path
) -> None:
    policy = TorchPolicy.load(trained.policy)
    (support,) = table_supports(artifact.manifest)
    table = DecisionTable.read(artifact.directory / TABLE)
    configs = Catalogue.from_json(artifact.manifest.catalogue).configs
    environment = loopback_environment(artifact.directory, SYSTEM)
    acted = 0
    with TunerPlugin(plugin_path).communicator(
        32, 4, environment=environment, all_ranks=True
    ) as communicator:
        for collective in (Collective.AllReduce, Collective.AllGather):
            for octave in range(16, 31):
                size, index = 1 << octave, size_bin(1 << octave)
                tasks = cold_tasks(support, collective, [size])
                observation = cold_observations(
                    tasks, artifact.manifest.launch_profiles, artifact.manifest.cost_table()
                )
                mask = allowed(artifact.manifest, support, collective, [index])
                wanted = configs[int(policy.act(observation, mask)[0])]
                assert (table.lookup(collective, size) or configs[0]) == wanted
                call = Call(GROUP, collective, size)
                answer = communicator.ask(collective, size, default_model().cost_table(call))
                if wanted == configs[0]:
                    own = default_model().resolve(call, configs[0])
                    assert not answer.acted
                    assert answer.config == replace(own, num_channels=None)
                else:
                    assert answer.config == wanted
                    acted += 1
    assert acted >= 3


def test_table_acts_only_near_sizes_that_were_measured(artifact: Artifact) -> None:
    table = DecisionTable.read(artifact.directory / TABLE)
    assert table.first_bin == size_bin(1 << 16)
    assert table.first_bin + table.num_bins - 1 == size_bin(1 << 30)
    for size in (1 << 10, 1 << 35):
        assert all(table.lookup(collective, size) is None for collective in TUNED)
    for size in (1 << 20, 1 << 24):
        assert table.lookup(Collective.Broadcast, size) is None


def test_table_abstains_where_the_default_was_not_measured(artifact: Artifact) -> None:
    (support,) = copy.deepcopy(table_supports(artifact.manifest))
    measured = support.measured["AllReduce"]
    measured["0"] = [b for b in measured["0"] if b < size_bin(1 << 20)]
    bins = range(size_bin(1 << 16), size_bin(1 << 30) + 1)
    mask = allowed(artifact.manifest, support, Collective.AllReduce, bins)
    centres = np.array(bins)
    assert mask[centres <= size_bin(1 << 19), 0].all()
    assert not mask[centres > size_bin(1 << 20) + 4, 0].any()


def test_table_that_the_policy_does_not_decide_is_refused(copied: Path) -> None:
    table = DecisionTable.read(copied / TABLE)
    entries = table.entries.copy()
    entries[...] = 0
    entries["algorithm"] = entries["protocol"] = -1
    idle = DecisionTable(
        num_nodes=4,
        num_ranks=32,
        ranks_per_node=8,
        first_bin=table.first_bin,
        num_bins=table.num_bins,
        entries=entries,
    )
    (copied / TABLE).write_bytes(idle.to_bytes())
    manifest = Manifest.read_unchecked(copied).write(copied)
    PluginIndex.of_artifact(copied, table_supports(manifest)).write(copied)
    with pytest.raises(ArtifactMismatch, match="not what policy"):
        verify_artifact(copied)


def test_policy_directory_is_not_yet_an_artifact(trained: Trained) -> None:
    with pytest.raises(ArtifactMismatch, match="not yet an artifact"):
        verify_artifact(trained.policy)


def test_foreign_manifest_version_is_refused(copied: Path) -> None:
    path = copied / "manifest.json"
    raw = json.loads(path.read_text())
    path.write_text(json.dumps({**raw, "format_version": 99}))
    with pytest.raises(SchemaMismatch, match="99"):
        verify_artifact(copied)


def test_unknown_shape_and_system_list_the_choices(artifact: Artifact) -> None:
    assert pick_table(artifact, 4, 32, None).path == TABLE
    with pytest.raises(UnknownName, match="--ranks 32 --nodes 4"):
        pick_table(artifact, 2, 16, None)
    with pytest.raises(UnknownName, match=SYSTEM):
        pick_table(artifact, 4, 32, "elsewhere")


def test_nccl_csv_is_what_nvidias_example_tuner_reads(artifact: Artifact) -> None:
    table = DecisionTable.read(artifact.directory / TABLE)
    written = nccl_csv(table)
    lines = [line for line in written.text.splitlines() if not line.startswith("#")]
    assert lines
    covered = 0
    for line in lines:
        assert len(line) < 255
        collective, low, high, algorithm, protocol, channels, nodes, ranks, ops, reg = line.split(
            ","
        )
        assert channels != "-1"
        assert (nodes, ranks, ops, reg) == ("4", "32", "-1", "-1")
        assert line == line.lower()
        first, last = size_bin(int(low)), size_bin(int(high))
        assert int(low) == bin_first_byte(first)
        assert int(high) == bin_first_byte(last + 1) - 1
        for index in range(first, last + 1):
            config = table.lookup(Collective.parse(collective), bin_center_bytes(index))
            assert config is not None
            assert config.key.lower() == f"{algorithm.replace('_', '')}/{protocol}"
            covered += 1
    assert covered + written.bins_abstaining + written.bins_with_auto == table.entries.size
    assert covered == int(table.entries["act"].sum())
