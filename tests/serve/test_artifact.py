"""Export, verify and use an artifact: one observation through policy, TorchScript and plugin."""

import contextlib
import copy
import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.features import TUNED, cold_observations
from dynamiccl.datasets.manifest import Manifest, Support
from dynamiccl.datasets.questions import allowed, cold_tasks, table_supports
from dynamiccl.errors import (
    ArtifactMismatch,
    CorruptFile,
    SchemaMismatch,
    UnknownName,
    UserError,
)
from dynamiccl.nccl import Collective
from dynamiccl.serve.artifact import (
    MAX_BYTES,
    Artifact,
    PluginIndex,
    known_machines,
    open_artifact,
    pick_table,
)
from dynamiccl.serve.explain import nccl_csv
from dynamiccl.serve.export import export_artifact, verify_artifact
from dynamiccl.serve.table import DecisionTable
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.h100 import default_model
from dynamiccl.simulator.system import Call
from dynamiccl.sizes import bin_center_bytes, bin_first_byte, size_bin
from dynamiccl.train.policy import TorchPolicy
from tests.cli.conftest import Shell, refused
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
    with pytest.raises(UnknownName, match="choose from 4x8"):
        pick_table(artifact, 2, 16, None)
    with pytest.raises(UnknownName, match=SYSTEM):
        pick_table(artifact, 4, 32, "elsewhere")


def test_nccl_csv_is_what_nvidias_example_tuner_reads(artifact: Artifact) -> None:
    table = DecisionTable.read(artifact.directory / TABLE)
    text, abstaining, auto = nccl_csv(table)
    lines = [line for line in text.splitlines() if not line.startswith("#")]
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
    assert covered + abstaining + auto == table.entries.size
    assert covered == int(table.entries["act"].sum())


# --- plugin.index ---


@pytest.fixture
def boxed(small_artifact: Artifact, tmp_path: Path) -> Path:
    return Path(shutil.copytree(small_artifact.directory, tmp_path / "boxed"))


BOX = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809"
OTHER = BOX.replace("*8;mig", "*4;mig")
HASH = "ab" * 32
INDEX = PluginIndex(
    HASH,
    {BOX: "box"},
    {("box", Collective.AllReduce): 31000},
    {("box", 1, 8): HASH, ("box", 2, 16): HASH},
)


def support(system: str, num_nodes: int, *fingerprints: str) -> Support:
    return Support(
        system=system,
        num_nodes=num_nodes,
        ranks_per_node=8,
        num_ranks=8 * num_nodes,
        launch_profile="default",
        nccl_version="2.28.9",
        gpu="H100",
        simulated=False,
        environment={},
        measured={},
        noise_bands={},
        fingerprints=list(fingerprints),
    )


def test_text_is_lines_of_fields_between_tabs_and_a_changed_byte_is_seen(tmp_path: Path) -> None:
    """A changed byte changes the hash, or the index is refused."""
    data = INDEX.to_bytes()
    assert data.decode() == (
        f"dynamiccl-index\t1\nartifact\t{HASH}\nsystem\tbox\t{BOX}\nnoise\tbox\t4\t31000\n"
        f"table\tbox\t1\t8\t{HASH}\ntable\tbox\t2\t16\t{HASH}\n"
    )
    INDEX.write(tmp_path)
    assert PluginIndex.read(tmp_path) == INDEX
    for i in range(len(data)):
        changed = data[:i] + bytes([data[i] ^ 1]) + data[i + 1 :]
        (tmp_path / "plugin.index").write_bytes(changed)
        with contextlib.suppress(CorruptFile):
            assert PluginIndex.read(tmp_path).sha256 != INDEX.sha256
    head = b"dynamiccl-index\t1\n"
    for text in (b"", b"\n", head, head + b"artifact\tx\n", b"\xff\n", b"a\tb"):
        (tmp_path / "plugin.index").write_bytes(text)
        with pytest.raises(CorruptFile, match="is not a usable index"):
            PluginIndex.read(tmp_path)


def test_index_is_never_more_than_the_plugin_reads() -> None:
    many = {("box", 1, ranks): HASH for ranks in range(1, 1000)}
    with pytest.raises(UserError, match=str(MAX_BYTES)):
        replace(INDEX, tables=many).to_bytes()


def test_machine_is_known_where_all_tables_of_a_system_were_measured_on_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert known_machines([support("a", 1, BOX, OTHER), support("a", 2, BOX)]) == {BOX: "a"}
    assert known_machines([support("a", 1, BOX), support("a", 2)]) == {}
    assert known_machines([support("a", 1, BOX), support("b", 1, OTHER)]) == {BOX: "a", OTHER: "b"}
    # One of two systems is of neither.
    assert known_machines([support("a", 1, BOX), support("b", 1, BOX), support("c", 1, BOX)]) == {}
    assert "systems a, b, c are the same kind of machine" in caplog.text


def test_bind_adds_a_machine_and_moves_it() -> None:
    assert INDEX.bound("box", OTHER).machines_of("box") == [OTHER, BOX]
    with pytest.raises(UnknownName, match="did you mean 'box'"):
        INDEX.bound("Box", OTHER)
    with pytest.raises(UserError, match="no fingerprint"):
        INDEX.bound("box", "H100")


def test_export_writes_the_index_last(boxed: Path) -> None:
    index = PluginIndex.read(boxed)
    manifest = (boxed / "manifest.json").read_bytes()
    table = (boxed / "tables/box/nodes1_ranks8.dct").read_bytes()
    assert index.manifest_sha256 == hashlib.sha256(manifest).hexdigest()
    assert index.tables == {("box", 1, 8): hashlib.sha256(table).hexdigest()}
    assert index.sha256 == hashlib.sha256((boxed / "plugin.index").read_bytes()).hexdigest()
    assert index.systems == {}  # hand-made rows say nothing of a machine
    assert open_artifact(boxed).to_json()["machines"] == {"box": []}


def test_index_of_something_else_is_found(boxed: Path, shell: Shell) -> None:
    index = PluginIndex.read(boxed)
    for odd in (
        replace(index, manifest_sha256=HASH),
        replace(index, tables={("box", 1, 8): HASH}),
        replace(index, noise_ppm={("box", Collective.AllReduce): 1}),
    ):
        odd.write(boxed)
        with pytest.raises(ArtifactMismatch, match="not of the manifest and files"):
            open_artifact(boxed)
    replace(index, systems={BOX: "nowhere"}).write(boxed)
    assert "names nowhere" in refused(shell("dynamiccl-deploy", "explain", boxed), 3)
    (boxed / "plugin.index").unlink()
    assert "has no plugin.index" in refused(shell("dynamiccl-deploy", "explain", boxed), 3)


def test_bind_command_binds_a_given_machine_and_a_kill_file_is_no_damage(
    boxed: Path, shell: Shell
) -> None:
    bind = ("dynamiccl-deploy", "bind", boxed, "--fingerprint")
    said = shell(*bind, BOX).out
    assert said == f"{BOX}: belongs to box\n{boxed}: now {PluginIndex.read(boxed).sha256}\n"
    assert PluginIndex.read(boxed).systems == {BOX: "box"}
    (boxed / "kill").touch()
    verify_artifact(boxed)
    assert "is no fingerprint; one looks like" in refused(shell(*bind, "H100"), 2)
