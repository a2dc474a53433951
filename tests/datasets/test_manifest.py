import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.manifest import MANIFEST_NAME, Manifest, Support, find_supports
from dynamiccl.datasets.questions import allowed, read_back_channels
from dynamiccl.errors import ArtifactMismatch, CorruptFile, MissingPath, SchemaMismatch
from dynamiccl.nccl import Collective
from dynamiccl.sizes import size_bin
from tests.policies import hand_made_manifest
from tests.rows import MIB, default, forced, frame

NOISE = pl.DataFrame(
    {"system": ["box", "box", "far"], "collective": ["AllReduce", "AllGather", "AllReduce"]}
).with_columns(noise_band=pl.Series([0.01, 0.02, 0.9]))


KNOWN_NOISE = pl.DataFrame({"system": ["box"], "collective": ["AllReduce"], "noise_band": [0.01]})


def supports(*rows: dict[str, Any]) -> list[Support]:
    made = frame(*rows)
    return find_supports(made, Catalogue.from_frame(made), NOISE)


def manifest() -> Manifest:
    return hand_made_manifest(frame(default(), forced("Ring", "LL")), NOISE)


@pytest.fixture(name="policy")
def policy_fixture(tmp_path: Path) -> Path:
    (tmp_path / "tables").mkdir()
    (tmp_path / "policy.pt").write_bytes(b"weights")
    (tmp_path / "tables" / "one.dcct").write_bytes(b"table")
    manifest().write(tmp_path)
    return tmp_path


def test_support_holds_the_bins_of_every_action() -> None:
    sizes = [1 << 20, 1 << 22, 1 << 20]
    [support] = supports(
        *(default(size_bytes=size, repeat=i) for i, size in enumerate(sizes)),
        forced("Ring", "LL", size_bytes=1 << 30),
        forced("Ring", "LL", collective="AllGather"),
    )
    assert support.measured == {
        "AllReduce": {"0": [size_bin(1 << 20), size_bin(1 << 22)], "1": [size_bin(1 << 30)]},
        "AllGather": {"1": [size_bin(1 << 20)]},
    }
    assert (support.system, support.num_nodes, support.ranks_per_node) == ("box", 1, 8)
    assert support.noise_bands == {"AllReduce": 0.01, "AllGather": 0.02}
    assert support.simulated is False


def ran(size: int, *used: int | None, **columns: Any) -> list[dict[str, Any]]:
    """Repeats of NCCL's choice, or of another if columns name it, that took so many channels."""
    where = {"size_bytes": size, "is_default": not columns, **columns}
    return [default(repeat=i, actual_num_channels=n, **where) for i, n in enumerate(used)]


def test_channels_are_those_of_the_nearest_bins_read_back_and_in_doubt_the_safe_ones() -> None:
    sizes = [1 << k for k in (20, 21, 22, 25)]
    rows = [
        *(row for size, used in zip(sizes, [(16, 8), (24,), (None,), (32,)], strict=True)
          for row in ran(size, *used)),
        *(row for size, used in zip(sizes, [(2, 4), (6,), (None,), (8,)], strict=True)
          for row in ran(size, *used, requested_algorithm="Ring")),
    ]  # fmt: skip
    made = replace(manifest(), catalogue=Catalogue.from_frame(frame(*rows)).to_json())
    [support] = supports(*rows)
    assert support.channels == {"AllReduce": {"0": [8, 24, None, 32], "1": [4, 6, None, 8]}}
    first = size_bin(1 << 20)

    def at(*bins: int) -> list[list[float]]:
        found = read_back_channels(made, support, Collective.AllReduce, [first + b for b in bins])
        shown: list[list[float]] = np.nan_to_num(found, nan=-1.0).tolist()
        return shown

    # Between two, just beyond the last of them, in the bin without, and too far from all.
    assert at(0, 1, 4) == [[8.0, 4.0], [8.0, 6.0], [24.0, 6.0]]
    assert at(-4, 8, 17) == [[8.0, 4.0], [24.0, 6.0], [32.0, 8.0]]
    assert at(-5, 10) == [[-1.0, -1.0], [-1.0, -1.0]]


@pytest.mark.parametrize(("version", "known"), [("2.28.9", True), ("2.29.2", False)])
def test_channels_that_no_job_asks_for_are_not_known(version: str, known: bool) -> None:
    where: dict[str, Any] = {"collective": "AllGather", "nccl_version": version}
    rows = [
        default(actual_num_channels=16, **where),
        forced("Ring", "LL", actual_num_channels=16, **where),
        forced("Ring", "LL", channels=4, actual_num_channels=4, **where),
    ]
    made = replace(manifest(), catalogue=Catalogue.from_frame(frame(*rows)).to_json())
    [support] = supports(*rows)
    [found] = read_back_channels(made, support, Collective.AllGather, [size_bin(MIB)])
    assert found[:2].tolist() == [16.0, 16.0]
    assert (found[2] == 4.0) == known


def test_rows_that_prove_nothing_support_nothing() -> None:
    columns: list[dict[str, Any]] = [
        *({"time_us": None}, {"status": "failed"}, {"interference_kind": "congestion"}),
        *({"collective": "AlltoAll"}, {"num_nodes": None}, {"size_bytes": 0}),
    ]
    assert supports(*(default(**each) for each in columns), forced(None)) == []


def test_a_support_is_of_a_shape_profile_and_version_and_knows_what_any_row_knows() -> None:
    node = "gpu=H100*8;mig=0;nic=infiniband*{}"
    found = supports(
        default(node_fingerprint=node.format(8), actual_num_channels=16),
        default(node_fingerprint=node.format(8), nic_kind="efa", repeat=1),
        default(node_fingerprint=node.format(4), repeat=2),
        default(node_fingerprint="gpu=H100*1;mig=0;nic=roce*1", source="simulator", repeat=4),
        forced("Ring", "LL", channels=64, actual_num_channels=24),
        default(num_nodes=2, num_ranks=16),
        default(launch_profile="tuned"),
        default(nccl_version="2.28.9"),
        default(nccl_version=None),
    )
    assert len(found) == 5
    assert {s.num_ranks for s in found} == {8, 16}
    assert sorted(s.most_channels or 0 for s in found) == [0, 0, 0, 0, 24]
    (known,) = [support for support in found if support.most_channels]
    machines = [f"{node.format(count)};nccl=22705" for count in (4, 8)]
    assert known.fingerprints == machines
    assert (known.environment["nic_kind"], known.environment["cpu_vendor"]) == ("efa", None)


def test_manifest_round_trip(policy: Path) -> None:
    read = Manifest.read(policy)
    assert replace(read, files={}) == manifest()
    assert sorted(read.files) == ["policy.pt", "tables/one.dcct"]
    assert list(policy.rglob(".*")) == []  # no hidden file is left
    assert read.actions().to_json() == read.catalogue
    noise = [("box", "AllReduce", 0.01), ("box", "AllGather", 0.02)]
    assert read.noise_table().rows() == noise
    # Written again it lists what is there now.
    (policy / "tables" / "one.dcct").unlink()
    written = Manifest.read_unchecked(policy).write(policy)
    assert list(Manifest.read(policy).files) == list(written.files) == ["policy.pt"]
    with pytest.raises(MissingPath, match="give a run directory"):
        Manifest.read(policy / "tables")


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("policy.pt", b"weighty", r"policy\.pt is not the file .*SHA-256 differs"),
        ("tables/one.dcct", b"tablf", r"one\.dcct is not the file .*SHA-256 differs"),
        ("tables/one.dcct", None, r"lacks tables/one\.dcct"),
        *(
            (name, b"", rf"holds {name}, which its manifest does not list")
            for name in ("more.bin", "tables/two.dcct", "tables/manifest.json", ".hidden")
        ),
    ],
)
def test_what_differs_is_named(name: str, content: bytes | None, said: str, policy: Path) -> None:
    if content is None:
        (policy / name).unlink()
    else:
        (policy / name).write_bytes(content)
    with pytest.raises(ArtifactMismatch, match=said):
        Manifest.read(policy)


def change(policy: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    path = policy / MANIFEST_NAME
    raw = json.loads(path.read_text())
    edit(raw)
    path.write_text(json.dumps(raw))


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("files", [], "files"),
        ("catalogue", "x", "catalogue"),
        ("catalogue", [{"action": 0}], "its catalogue is not one of configs"),
        ("catalogue", [{**manifest().catalogue[1], "requested_algorithm": "Rign"}], "Rign"),
        ("supports", [{**asdict(manifest())["supports"][0], "measured": 1}], "measured"),
        ("supports", None, "supports: Field required"),
    ],
)
def test_a_wrong_field_is_corrupt(field: str, value: object, said: str, policy: Path) -> None:
    missing = value is None
    change(policy, lambda raw: raw.pop(field) if missing else raw.update({field: value}))
    with pytest.raises(CorruptFile, match=rf"manifest\.json: .*{said}.*export the policy again"):
        Manifest.read(policy)
    change(policy, lambda raw: raw.update(format_version=1))
    with pytest.raises(SchemaMismatch, match="version 1, this release reads 2; train again"):
        Manifest.read(policy)


@pytest.mark.parametrize("content", [b"", b"[]", b"\xff\xfe", b"null", 70])
def test_what_is_no_json_object_is_corrupt(content: bytes | int, policy: Path) -> None:
    path = policy / MANIFEST_NAME
    if isinstance(content, int):  # cut off there, in per cent
        content = path.read_bytes()[: len(path.read_bytes()) * content // 100]
    path.write_bytes(content)
    with pytest.raises(CorruptFile, match="not a JSON object"):
        Manifest.read(policy)


def names_allowed(*rows: dict[str, Any]) -> set[str]:
    """The configs that a table of the rows' only group may hold at one mebibyte."""
    manifest = hand_made_manifest(frame(*rows), KNOWN_NOISE)
    (support,) = manifest.supports
    mask = allowed(manifest, support, Collective.AllReduce, [size_bin(MIB)])
    configs = manifest.actions().configs
    return {config.key for config, may in zip(configs, mask[0], strict=True) if may}


def test_a_table_asks_for_no_more_channels_than_nccl_was_seen_to_use() -> None:
    seen = names_allowed(
        default(actual_num_channels=16),
        forced("Ring", "Simple", channels=8, actual_num_channels=8),
        forced("Ring", "Simple", channels=24, actual_num_channels=24),
        forced("Ring", "Simple", channels=64, actual_num_channels=24),
    )
    assert {name.split("/")[-1] for name in seen} == {"8ch", "24ch", "ABSTAIN"}
    # Without a read-back no number of channels is known to be there.
    unread = forced("Ring", "Simple"), forced("Ring", "Simple", channels=8)
    assert names_allowed(default(), *unread) == {"ABSTAIN", "Ring/Simple"}
