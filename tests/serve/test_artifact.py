"""An artifact, its index and its tables: what they hold, and what is refused."""

import contextlib
import hashlib
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.manifest import Manifest, Support
from dynamiccl.errors import ArtifactMismatch, CorruptFile, MissingPath, UnknownName, UserError
from dynamiccl.files import WRITING
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.schedule import fnv1a
from dynamiccl.serve.artifact import MAX_BYTES, Artifact, PluginIndex, known_machines, open_artifact
from dynamiccl.serve.export import export_artifact
from dynamiccl.serve.table import (
    ENTRY,
    HEADER_BYTES,
    MAX_BINS,
    MAX_FILE_BYTES,
    DecisionTable,
    relative_path,
)
from dynamiccl.sizes import bin_center_bytes, size_bin
from tests.cli.conftest import Shell, refused
from tests.serve.brains import FIRST_BIN, NUM_BINS, SIZES

TABLE = "tables/box/nodes1_ranks8.dct"


def test_a_table_acts_near_measured_sizes_only(small_artifact: Artifact) -> None:
    assert [(info.path, info.system) for info in small_artifact.tables] == [(TABLE, "box")]
    assert small_artifact.tables[0].acting > 0
    assert set(small_artifact.manifest.files) == {"policy.pt", "brain.pt", TABLE}
    table = DecisionTable.read(small_artifact.directory / TABLE)
    assert (table.first_bin, table.num_bins) == (FIRST_BIN, NUM_BINS)
    for size in (SIZES[0] >> 2, SIZES[-1] << 2):
        assert all(table.at(collective, size_bin(size)) is None for collective in TUNED)
    assert all(table.at(Collective.Broadcast, size_bin(size)) is None for size in SIZES)


def test_unknown_shape_and_system_list_the_choices(small_artifact: Artifact) -> None:
    support, table = small_artifact.pick(1, 8, None)
    assert (support.system, table) == ("box", DecisionTable.read(small_artifact.directory / TABLE))
    with pytest.raises(UnknownName, match=r"16 ranks on 2 nodes.*choose from 1x8"):
        small_artifact.pick(2, 16, None)
    with pytest.raises(UnknownName, match="box"):
        small_artifact.pick(1, 8, "elsewhere")


# --- plugin.index ---

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
    many = {("box", 1, ranks): HASH for ranks in range(1, 1000)}
    with pytest.raises(UserError, match=str(MAX_BYTES)):
        replace(INDEX, tables=many).to_bytes()


def test_a_machine_is_known_where_all_was_measured_on_it(caplog: pytest.LogCaptureFixture) -> None:
    assert known_machines([support("a", 1, BOX, OTHER), support("a", 2, BOX)]) == {BOX: "a"}
    assert known_machines([support("a", 1, BOX), support("a", 2)]) == {}
    assert known_machines([support("a", 1, BOX), support("b", 1, OTHER)]) == {BOX: "a", OTHER: "b"}
    # One of two systems is of neither.
    assert known_machines([support("a", 1, BOX), support("b", 1, BOX), support("c", 1, BOX)]) == {}
    assert "systems a, b, c are the same kind of machine" in caplog.text


def test_bind_adds_a_machine_and_moves_it() -> None:
    assert INDEX.bound("box", OTHER).machines_of("box") == [OTHER, BOX]
    with pytest.raises(UserError, match="no fingerprint"):
        INDEX.bound("box", "H100")


def test_index_of_something_else_is_found(copied: Path, shell: Shell) -> None:
    index = PluginIndex.read(copied)
    table = (copied / TABLE).read_bytes()
    assert index.tables == {("box", 1, 8): hashlib.sha256(table).hexdigest()}
    assert index.systems == {}  # hand-made rows say nothing of a machine
    (copied / "kill").touch()
    open_artifact(copied)  # a kill file is no damage
    for odd in (
        replace(index, manifest_sha256=HASH),
        replace(index, tables={("box", 1, 8): HASH}),
        replace(index, noise_ppm={("box", Collective.AllReduce): 1}),
    ):
        odd.write(copied)
        with pytest.raises(ArtifactMismatch, match="not of the manifest and files"):
            open_artifact(copied)
    (copied / "plugin.index").unlink()
    assert "has no plugin.index" in refused(shell("dynamiccl-deploy", "explain", copied), 3)


def test_a_policy_has_no_table(copied: Path, shell: Shell) -> None:
    (copied / TABLE).unlink()
    Manifest.read_unchecked(copied).write(copied)
    assert "a policy has none" in refused(shell("dynamiccl-deploy", "explain", copied), 2)


def test_refused_and_killed_exports_go(
    policy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed = tmp_path / f"{WRITING}killed"
    killed.mkdir()
    os.utime(killed, (0, 0))
    # As a disk that does not keep what was written.
    with monkeypatch.context() as patch:
        patch.setattr(PluginIndex, "to_bytes", lambda _: b"torn")
        with pytest.raises(CorruptFile, match="is not a usable index"):
            export_artifact(policy, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(f"{WRITING}*"))
    artifact = export_artifact(policy, tmp_path / "out")
    assert artifact == open_artifact(tmp_path / "out")


RING = Config(Algorithm.Ring, Protocol.LL128, 8)


def table_of(config: Config | None, *, first_bin: int = 80, num_bins: int = 3) -> DecisionTable:
    return DecisionTable.from_configs(
        [[config] * num_bins] * 5, num_nodes=1, num_ranks=8, first_bin=first_bin
    )


def test_every_flipped_bit_and_truncation_is_found_and_the_longest_file_is_known() -> None:
    data = table_of(RING).to_bytes()
    flipped = (
        bytes(byte ^ (1 << bit) * (index == at) for index, byte in enumerate(data))
        for at in range(len(data))
        for bit in range(8)
    )
    for damaged in (*flipped, *(data[:size] for size in range(len(data))), data + b"\0"):
        with pytest.raises(CorruptFile, match=r"nodes1_ranks8\.dct is not a usable decision table"):
            DecisionTable.from_bytes(damaged, where="nodes1_ranks8.dct")
    assert len(table_of(RING, first_bin=0, num_bins=MAX_BINS).to_bytes()) == MAX_FILE_BYTES


def test_entry_that_cannot_be_is_found_under_a_good_checksum() -> None:
    for config, column, values, problem in (
        (RING, 0, (7, 254), "outside the vocabulary"),
        (RING, 1, (3, 254), "outside the vocabulary"),
        (RING, 2, (65, 200), "outside the vocabulary"),
        (RING, 3, (2, 255), "outside the vocabulary"),
        (RING, 3, (0,), "if, and only if"),
        (None, 3, (1,), "if, and only if"),
    ):
        for value in values:
            data = bytearray(table_of(config).to_bytes()[:-8])
            data[HEADER_BYTES + column] = value
            with pytest.raises(CorruptFile, match=problem):
                DecisionTable.from_bytes(bytes(data) + fnv1a(bytes(data)).to_bytes(8, "little"))


def test_lookup_inside_and_outside_the_bins() -> None:
    table = table_of(RING)
    sizes = [0, 1 << 70, *(bin_center_bytes(index) for index in (79, 80, 82, 83))]
    found = [table.at(Collective.AllReduce, size_bin(size)) for size in sizes]
    assert found == [None, None, None, RING, RING, None]
    assert table.at(Collective.AlltoAll, size_bin(sizes[3])) is None
    # Size zero has no bin.
    table = table_of(RING, first_bin=0)
    assert size_bin(0) == -1
    assert table.at(Collective.AllReduce, size_bin(0)) is None
    assert table.at(Collective.AllReduce, size_bin(1)) == RING
    assert table_of(ABSTAIN) == table_of(None)
    part = Config(protocol=Protocol.LL, chunk_bytes=1 << 19)  # and the rest is NCCL's own
    assert table_of(part).at(Collective.Broadcast, size_bin(1 << 20)) == part


def test_what_nccl_cannot_run_is_never_written() -> None:
    for config, problem in (
        (Config(Algorithm.Tree, Protocol.LL), "Broadcast has no Tree"),
        (Config(num_channels=65), "outside the vocabulary"),
        (Config(num_channels=300), "does not fit"),
        (Config(chunk_bytes=1 << 31), "does not fit"),
        (Config(chunk_bytes=-1), "outside the vocabulary"),
    ):
        with pytest.raises(ValueError, match=problem):
            table_of(config)
    for nodes, ranks, first_bin, shape in (
        *((2, 7, 0, (5, 1)), (0, 0, 0, (5, 1)), (1, 1 << 31, 0, (5, 1)), (1, 8, -1, (5, 1))),
        *((1, 8, 0, (5, 0)), (1, 8, 248, (5, 2)), (1, 8, 0, (4, 1))),
    ):
        of = {"num_nodes": nodes, "num_ranks": ranks, "first_bin": first_bin}
        with pytest.raises(ValueError, match=r"do not lie alike|are outside|are not of five"):
            DecisionTable(**of, entries=np.zeros(shape, dtype=ENTRY))


def test_read_names_the_file_and_what_was_checked_cannot_be_changed(tmp_path: Path) -> None:
    path = tmp_path / relative_path("h100", 1, 8)
    with pytest.raises(MissingPath, match=r"nodes1_ranks8\.dct; a policy has none:"):
        DecisionTable.read(path)
    path.parent.mkdir(parents=True)
    path.write_bytes(table_of(RING).to_bytes())
    assert DecisionTable.read(path) == table_of(RING)
    with pytest.raises(ValueError, match="read-only"):
        DecisionTable.read(path).entries["algorithm"] = 99
    for system in ("", "..", "a/b", "H100", "a b", "-x"):
        with pytest.raises(UserError, match="cannot name a table directory"):
            relative_path(system, 1, 8)
