"""plugin.index as it is written, checked and bound."""

import contextlib
import hashlib
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.datasets.manifest import Support
from dynamiccl.errors import ArtifactMismatch, CorruptFile, UnknownName, UserError
from dynamiccl.nccl import Collective
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.export import verify_artifact
from dynamiccl.serve.plugin_index import MAX_BYTES, PluginIndex, known_machines
from tests.cli.conftest import Shell, refused

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


def test_text_is_lines_of_fields_between_tabs() -> None:
    assert INDEX.to_bytes().decode() == (
        f"dynamiccl-index\t1\nartifact\t{HASH}\nsystem\tbox\t{BOX}\nnoise\tbox\t4\t31000\n"
        f"table\tbox\t1\t8\t{HASH}\ntable\tbox\t2\t16\t{HASH}\n"
    )
    assert PluginIndex.from_bytes(INDEX.to_bytes(), where="x") == INDEX


def test_any_changed_byte_changes_the_hash_or_is_refused() -> None:
    data = INDEX.to_bytes()
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1
        with contextlib.suppress(CorruptFile):
            assert PluginIndex.from_bytes(bytes(changed), where="x").sha256 != INDEX.sha256


@pytest.mark.parametrize(
    "text",
    ["", "\n", "dynamiccl-index\t1\n", "dynamiccl-index\t1\nartifact\tx\n", "\xff\n", "a\tb"],
)
def test_what_is_no_index_is_refused(text: str) -> None:
    with pytest.raises(CorruptFile, match="x is not a usable index"):
        PluginIndex.from_bytes(text.encode("latin-1"), where="x")


def test_index_is_never_more_than_the_plugin_reads() -> None:
    many = {("box", 1, ranks): HASH for ranks in range(1, 1000)}
    with pytest.raises(UserError, match=str(MAX_BYTES)):
        replace(INDEX, tables=many).to_bytes()


def test_machine_is_known_where_all_tables_of_a_system_were_measured_on_it() -> None:
    assert known_machines([support("a", 1, BOX, OTHER), support("a", 2, BOX)]) == {BOX: "a"}
    assert known_machines([support("a", 1, BOX), support("a", 2)]) == {}
    assert known_machines([support("a", 1, BOX), support("b", 1, OTHER)]) == {BOX: "a", OTHER: "b"}


def test_machine_of_two_systems_is_of_neither(caplog: pytest.LogCaptureFixture) -> None:
    assert known_machines([support("a", 1, BOX), support("b", 1, BOX), support("c", 1, BOX)]) == {}
    assert "systems a, b, c are the same kind of machine" in caplog.text


def test_bind_adds_a_machine_and_moves_it() -> None:
    assert INDEX.bound("box", OTHER).machines_of("box") == [OTHER, BOX]
    with pytest.raises(UnknownName, match="did you mean 'box'"):
        INDEX.bound("Box", OTHER)
    with pytest.raises(UserError, match="no fingerprint"):
        INDEX.bound("box", "H100")


def test_export_writes_the_index_last(artifact: Path) -> None:
    index = PluginIndex.read(artifact)
    manifest = (artifact / "manifest.json").read_bytes()
    table = (artifact / "tables/box/nodes1_ranks8.dct").read_bytes()
    assert index.manifest_sha256 == hashlib.sha256(manifest).hexdigest()
    assert index.tables == {("box", 1, 8): hashlib.sha256(table).hexdigest()}
    assert index.sha256 == hashlib.sha256((artifact / "plugin.index").read_bytes()).hexdigest()
    assert index.systems == {}  # hand-made rows say nothing of a machine
    assert open_artifact(artifact).to_json()["machines"] == {"box": []}


def test_index_of_something_else_is_found(artifact: Path, shell: Shell) -> None:
    index = PluginIndex.read(artifact)
    for odd in (
        replace(index, manifest_sha256=HASH),
        replace(index, tables={("box", 1, 8): HASH}),
        replace(index, noise_ppm={("box", Collective.AllReduce): 1}),
    ):
        odd.write(artifact)
        with pytest.raises(ArtifactMismatch, match="not of the manifest and files"):
            open_artifact(artifact)
    replace(index, systems={BOX: "nowhere"}).write(artifact)
    assert "names nowhere" in refused(shell("dynamiccl-deploy", "explain", artifact), 3)
    (artifact / "plugin.index").unlink()
    assert "has no plugin.index" in refused(shell("dynamiccl-deploy", "explain", artifact), 3)


def test_kill_file_is_no_damage(artifact: Path, shell: Shell) -> None:
    (artifact / "kill").touch()
    assert shell("dynamiccl-deploy", "explain", artifact).code == 0


def test_bind_command_binds_a_given_machine(artifact: Path, shell: Shell) -> None:
    bind = ("dynamiccl-deploy", "bind", artifact, "--fingerprint")
    said = shell(*bind, BOX, "--json").json
    assert said["system"] == "box"
    assert said["before"] is None
    assert said["sha256"] == PluginIndex.read(artifact).sha256
    assert PluginIndex.read(artifact).systems == {BOX: "box"}
    verify_artifact(artifact)
    assert "is no fingerprint; one looks like" in refused(shell(*bind, "H100"), 2)
