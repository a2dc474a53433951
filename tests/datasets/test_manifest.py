"""Manifests: what they support and refuse; and the choice of configs by the time of the step."""

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.manifest import (
    MANIFEST_NAME,
    JobTask,
    Losses,
    Manifest,
    Support,
    find_supports,
    with_shape,
)
from dynamiccl.datasets.objective import (
    change_of_task_us,
    fewest_within,
    losses_at,
    losses_of,
    may_take,
    near,
    placed_calls,
    step_change_us,
    sure_change_us,
)
from dynamiccl.datasets.questions import allowed, read_back_channels
from dynamiccl.datasets.splits import Split
from dynamiccl.errors import ArtifactMismatch, CorruptFile, MissingPath, SchemaMismatch
from dynamiccl.evaluate.job_calls import job_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.system import Contention
from dynamiccl.sizes import size_bin
from tests.calls import calls_frame, traced
from tests.evaluate.test_job import sweep
from tests.policies import hand_made_manifest
from tests.rows import MIB, default, forced, frame
from tests.simulator.test_physics import iteration_us, parts

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


def test_no_table_holds_what_failed_at_no_larger_size_or_computed_wrong_values() -> None:
    ring = [forced("Ring", "LL", channels=n, actual_num_channels=8) for n in (4, 6, 8)]
    rows = [default(actual_num_channels=8), *ring, forced("Tree", "LL", size_bytes=2 * MIB)]
    everything = {"ABSTAIN", "Ring/LL/4ch", "Ring/LL/6ch", "Ring/LL/8ch", "Tree/LL"}
    assert names_allowed(*rows) == everything
    failed = ring[0] | {"status": "timed_out", "time_us": None}
    for far in ({"size_bytes": 4 * MIB}, {"status": "infeasible"}, {"num_nodes": 2}):
        assert names_allowed(*rows, failed | far) == everything
    assert names_allowed(*rows, failed | {"size_bytes": MIB + 4}) == everything - {"Ring/LL/4ch"}
    # It failed here; one size above where it was measured; or had wrong values at whatever size.
    assert names_allowed(*rows, failed) == everything - {"Ring/LL/4ch"}
    tree = forced("Tree", "LL", None, size_bytes=MIB // 2, status="failed")
    assert names_allowed(*rows, tree) == everything - {"Tree/LL"}
    small = [forced("Tree", "LL", size_bytes=MIB // 2), tree | {"size_bytes": 2 * MIB}]
    assert names_allowed(*rows, *small) == everything - {"Tree/LL"}
    unread = ring[0] | {"status": "failed", "repeat": 1}  # it ended, and may be another config's
    assert names_allowed(*rows, unread) == everything
    wrong = failed | {"status": "wrong_values", "size_bytes": MIB << 8}
    assert names_allowed(*rows, wrong) == {"ABSTAIN", "Tree/LL"}
    own = default(status="wrong_values", actual_algorithm="Ring", actual_protocol="LL", repeat=7)
    assert names_allowed(*rows, own) == {"ABSTAIN", "Tree/LL"}
    # What leaves the protocol to NCCL may be any.
    left = forced("Tree", None, None, size_bytes=MIB // 2, status="failed")
    assert names_allowed(*rows, left) == everything - {"Tree/LL"}
    auto = [forced("Tree", size_bytes=2 * MIB), wrong | {"requested_algorithm": "Tree"}]
    assert names_allowed(*rows, *auto) == everything - {"Tree/LL"}
    # A time that is not there is no failure.
    assert names_allowed(*rows, tree | {"status": "ok"}) == everything
    # Nor is it credited with what it gained there.
    catalogue = Catalogue.from_frame(frame(*rows))
    masks = [task_grid(frame(*rows, *more), catalogue, list(Split)).mask for more in ([], [failed])]
    assert masks[0].sum() == masks[1].sum() + 1


def test_a_new_shape_holds_nothing_that_failed_at_another_under_any_release() -> None:
    rows = [
        make(size_bytes=size, num_nodes=nodes, num_ranks=8 * nodes, nccl_version=version)
        for nodes, version in ((1, "2.28.3"), (2, "2.28.3"), (2, "2.27.5"))
        for size in (MIB, 4 * MIB)
        for make in (default, partial(forced, "Ring", "LL"), partial(forced, "Tree", "LL"))
    ]
    ring = [row for row in rows if row.get("requested_algorithm") == "Ring"]
    ring[-1] |= {"status": "failed", "time_us": None}
    policy = replace(hand_made_manifest(frame(*rows), KNOWN_NOISE), knows_shapes=True)
    first, second = (s for s in with_shape(policy, 4, 8).supports if s.carried)
    names = [config.key for config in policy.actions().configs]
    for support in (first, second):
        bins = {names[int(a)]: b for a, b in support.measured["AllReduce"].items()}
        assert bins["Tree/LL"] == bins["ABSTAIN"] == [size_bin(MIB), size_bin(4 * MIB)]
        assert bins["Ring/LL"] == [size_bin(MIB)]
        assert [*support.failed["AllReduce"]] == [str(names.index("Ring/LL"))]


NAN = float("nan")
#: NCCL's own choice, one with as many channels, fewer, fewer and slower, and more.
TIMES = np.array([[100.0, 90.0, 94.0, 99.5, 80.0]])
CHANNELS = np.array([[16, 16, 8, 4, 32]], dtype=np.int16)


def test_slack_takes_the_fewest_known_channels_and_never_more_than_nccl() -> None:
    for slack, chosen in ((0.0, 1), (0.01, 1), (0.05, 2), (0.11, 3)):
        assert fewest_within(TIMES, CHANNELS, slack).tolist() == [chosen]
    # It differs by task.
    two = np.vstack([TIMES, [[100.0, 90.0, NAN, 99.5, NAN]]])
    channels = np.vstack([CHANNELS, CHANNELS])
    assert fewest_within(two, channels, np.array([[0.05], [0.0]])).tolist() == [2, 1]
    assert fewest_within(two, channels, np.array([[0.0], [0.05]])).tolist() == [1, 1]


@pytest.mark.parametrize("compute_us", [0.0, 300.0, 990.0, 1_500.0, 8_000.0])
def test_the_change_is_that_of_the_simulators_law(compute_us: float) -> None:
    law = Contention(100, 2000, memory_share=0.0, call_slowdown=0.0)
    runs = [parts(count, us) for count, us in [(24, 1000.0), (8, 1100.0), (2, 2000.0), (24, 400.0)]]
    steps = [iteration_us(law, ran, 1, compute_us) for ran in runs]
    loss = np.array([[ran.num_channels / 100 for ran in runs]])
    times = np.array([[ran.quiet_us for ran in runs]])
    traced = min(compute_us / 0.76, steps[0]), np.array([1000.0])
    found = step_change_us(times, loss, traced[1], np.array([traced[0]]))
    assert found[0].tolist() == pytest.approx([step - steps[0] for step in steps])


def job_task(compute_us: list[float], skew_us: float = 0.0) -> JobTask:
    """Calls of 100 us."""
    return JobTask(("AllReduce", 1, 8, 40), 100.0, skew_us, compute_us, {})


def test_less_than_what_was_measured_is_counted_on() -> None:
    # Two configs as fast, of which one takes half of what compute loses: 5 %, for 0.7 of 10 %.
    loss = np.array([[0.1, 0.05, NAN]])
    times = np.array([[100.0, 100.0, 90.0]])
    told = np.array([100.0]), np.array([500.0])
    plain = step_change_us(times, loss, *told)
    surely = sure_change_us(times, loss, *told)
    assert plain[0, 1] == pytest.approx(-5.0)
    assert surely[0, :2].tolist() == [0.0, pytest.approx(-2.0)]
    assert np.isnan(surely[0, 2])
    # Compute that ends with the call may end before it: what it gets back counts no more.
    assert sure_change_us(times, loss, told[0], told[0])[0, 1] == pytest.approx(0.0)
    # Own choice surely costs less than measured, and others more.
    losses = {"4096": {"": (0.12, 0.05, 1.0), "Ring/LL/2ch": (0.02, 0.01, 1.1)}}
    configs = [ABSTAIN, *(Config(Algorithm.Ring, Protocol.LL, n) for n in (2, 8))]
    [shares], [longer] = losses_at(losses, configs)
    assert shares.tolist() == pytest.approx([0.07, 0.03, np.nan], nan_ok=True)
    assert longer.tolist() == pytest.approx([1.0, 1.1, np.nan], nan_ok=True)


def test_a_call_may_take_longer_by_what_compute_gets_back() -> None:
    edges = np.array([[0.10, 0.05], [0.10, 0.056]])
    longer = may_take(edges, job_task([1_000.0]))
    # By the edge that says the least: 1.25 times as long, at 0.8 of 0.7 of the loss.
    assert longer.tolist() == pytest.approx([1.0, 1.25], abs=1e-4)
    change = change_of_task_us(np.tile(longer, (2, 1)), edges, job_task([1_000.0]))
    assert change.tolist() == pytest.approx([0.0, 0.0], abs=1e-3)
    assert may_take(np.array([[0.1, NAN]]), job_task([1_000.0]))[1] == 1.0
    # It waits for nobody: what compute gets back from waiting kernels is not its own.
    edges = np.array([[0.10, 0.07]])
    alike = may_take(edges, job_task([9_000.0]))[1]
    assert may_take(edges, job_task([9_000.0], skew_us=400.0))[1] == pytest.approx(alike, abs=1e-3)


def test_calls_that_compute_waits_for_count_as_many_as_they_are() -> None:
    """Of ten calls one is exposed: 96 us longer there weighs more than 0.3 us less in nine."""
    edges = np.array([[0.06, 0.02]])
    assert may_take(edges, job_task([6_000.0]))[1] == pytest.approx(2.0, abs=1e-4)
    # 9 x (2 r - 0.7 x 6) + 100 (r - 1) = 0.
    assert may_take(edges, job_task([0.0, *[6_000.0] * 9]))[1] == pytest.approx(1.1678, abs=1e-3)
    change = change_of_task_us(np.array([[1.0, 1.96]]), edges, job_task([0.0, *[6_000.0] * 9]))
    assert change[1] > 5.0


def told(share: float, channels: int = 0, kind: str = "matmul", **columns: Any) -> dict[str, Any]:
    """A row beside products of Ring/LL, which takes 200 us, or of NCCL's own choice, 160 us."""
    made = forced("Ring", "LL", 200.0, channels=channels) if channels else default(160.0)
    row = {"compute_loss_us": made["time_us"] * share, "compute_period_us": 400.0}
    beside = {"interference_kind": kind, "interference_level": 4096.0}
    return {**made, **beside, **row, "run": f"{share}", **columns}


def test_losses_are_shares_of_the_kernels_time_of_each_config_beside_each_kind() -> None:
    rows = [told(0.02, 1), told(0.04, 1), told(0.01, 4), told(0.12)]
    rows += [told(0.05, 8, compute_aa_difference=0.03)]
    rows += [told(0.4, kind="persistent-matmul"), told(0.3, 1, kind="persistent-matmul")]
    # In another environment, or of what runs alone, nothing is said.
    rows += [told(0.02, 1, launch_profile="x"), told(0.1, launch_profile="x")]
    rows += [default(100.0), forced("Ring", "LL", 90.0, channels=1, size_bytes=64)]
    assert losses_of(frame(*rows)) == {
        ("AllReduce", 1, 8): {
            size_bin(MIB): {
                "matmul 4096": {
                    "": pytest.approx((0.12, 0.12, 1.0)),
                    "Ring/LL/1ch": pytest.approx((0.03, 0.01, 1.25)),
                    # Of a single row no error is known: as large as what it says; or as its rates
                    # alone differ.
                    "Ring/LL/4ch": pytest.approx((0.01, 0.01, 1.25)),
                    "Ring/LL/8ch": pytest.approx((0.05, 0.06, 1.25)),
                },
                "persistent-matmul 4096": {
                    "": pytest.approx((0.4, 0.4, 1.0)),
                    "Ring/LL/1ch": pytest.approx((0.3, 0.3, 1.25)),
                },
            }
        }
    }


def test_tables_and_the_jobs_answer_place_a_trace_alike() -> None:
    """Groups of eight ranks on one node, on eight, and unnamed; of four nothing was measured.

    A table is not asked about the unnamed one: it may lie as either of two measured shapes.
    """
    rows = pl.concat([sweep(), sweep(num_nodes=8, ranks_per_node=1)])
    manifest = hand_made_manifest(rows, rows.select("system", "collective", noise_band=0.01))
    groups = ([*range(8)], [*range(0, 64, 8)], None, [*range(4)])
    named = [
        traced(n, size_bytes=MIB << n, group_ranks=ranks, num_ranks=len(ranks or range(8)))
        for n, ranks in enumerate(groups)
    ]
    calls = calls_frame(*named)
    found, [note] = placed_calls(calls, manifest)
    assert found["num_nodes"].to_list() == [1, 8]
    told = job_of(calls, None, 8)
    assert told.kinds["num_nodes"].to_list() == [1, 8, 1, 1]
    assert "ranks of 4 calls" in note
    assert note.endswith(
        "about 1, whose shape may be one of several: import with --nodes and --ranks"
    )
    assert told.lacks["nodes"] == 4
    # Where nothing is open nothing is said of it.
    _, [note] = placed_calls(calls_frame(*named[:2]), manifest)
    assert note.endswith("or else all of each node")


def test_beside_each_kind_the_nearest_size_within_an_octave_tells() -> None:
    plain: dict[str, Losses] = {"4096": {"": (0.1, 0.0, 1.0)}}
    by_bin = {40: plain, 44: {"8192": {"": (0.2, 0.0, 1.0)}}, 48: {"4096": {"": (0.3, 0.0, 1.0)}}}
    assert near(by_bin, 37) == plain
    assert near(by_bin, 41) == plain | by_bin[44]
    assert near(by_bin, 47) == by_bin[48] | by_bin[44]
    assert near(by_bin, 60) == {}


def test_a_config_counts_only_where_it_is_known_beside_every_kind() -> None:
    """Four channels hung beside larger products, and eight were throttled there.

    Beside smaller ones nothing but NCCL's own choice was tried: that says nothing of configs.
    """
    hung: dict[str, Any] = {"status": "timed_out", "time_us": None, "compute_loss_us": None}
    large: dict[str, Any] = {"interference_level": 8192.0}
    own = (0.2, 0.21)
    rows = [told(share, **beside) for share in own for beside in (large, {})]
    rows += [told(0.2, interference_level=512.0)]
    rows += [told(0.01, count) for count in (2, 4, 8)]
    rows += [told(0.02, 2, **large), told(0.0, 4, **large, **hung)]
    rows += [told(0.02, 8, **large, throttled=True)]
    configs = [ABSTAIN, *(Config(Algorithm.Ring, Protocol.LL, n) for n in (2, 4, 8))]

    def longest(*rows: dict[str, Any]) -> list[float]:
        [by_bin] = losses_of(frame(*rows)).values()
        losses = near(by_bin, size_bin(MIB))
        lost, longer = losses_at(losses, configs)
        job = JobTask(("AllReduce", 1, 8, 40), 100.0, 0.0, [9_000.0], losses)
        change = change_of_task_us(longer, lost, job)
        most: list[float] = may_take(lost, job).tolist()
        assert np.isnan(change).tolist() == [False, *(each == 1.0 for each in most[1:])]
        return most

    one, two, four, eight = longest(*rows)
    assert (one, two > 1.05, four, eight) == (1.0, True, 1.0, 1.0)
    # Where all others hung, nothing is known of any.
    failed = [told(0.0, 2, interference_level=512.0, **hung)]
    assert longest(*rows, *failed) == [1.0] * 4


@pytest.mark.parametrize(
    "own",
    [
        [],
        [told(0.2, interference_level=8192.0, throttled=True)],
        [told(0.2, interference_level=8192.0, time_us=None, compute_loss_us=None)],
    ],
    ids=["left out", "throttled", "hung"],
)
def test_no_config_is_taken_where_nccls_own_choice_is_unknown(own: list[dict[str, Any]]) -> None:
    """Two channels lose little beside one kind, and much beside another, as perhaps NCCL's do."""
    rows = [told(0.2), told(0.21), told(0.01, 2), told(0.7, 2, interference_level=8192.0), *own]
    [by_bin] = losses_of(frame(*rows)).values()
    losses = near(by_bin, size_bin(MIB))
    assert json.loads(json.dumps(losses, allow_nan=False))["matmul 8192"] == {}
    lost, longer = losses_at(losses, [ABSTAIN, Config(Algorithm.Ring, Protocol.LL, 2)])
    job = JobTask(("AllReduce", 1, 8, 40), 100.0, 0.0, [9_000.0], losses)
    assert may_take(lost, job).tolist() == [1.0, 1.0]
    assert change_of_task_us(longer, lost, job).tolist() == pytest.approx([0.0, NAN], nan_ok=True)


def test_of_two_sizes_of_one_bin_one_tells() -> None:
    """A config that was measured at the smaller alone is not known at the larger."""
    larger: dict[str, Any] = {"size_bytes": MIB + 4096}
    rows = [told(0.2), told(0.01, 2), told(0.02, 4), told(0.1, **larger), told(0.03, 4, **larger)]
    [by_bin] = losses_of(frame(*rows)).values()
    [losses] = by_bin[size_bin(MIB)].values()
    assert {config: loss[0] for config, loss in losses.items()} == {"": 0.1, "Ring/LL/4ch": 0.03}


@pytest.mark.parametrize("alone", [MIB + 4096, 3 * MIB // 2], ids=str)
@pytest.mark.parametrize("is_known", [True, False])
def test_own_choice_alone_hides_no_size(alone: int, *, is_known: bool) -> None:
    """Not at another size of the bin, and not in the nearest bin; also where it is unknown."""
    rows = [told(0.2), told(0.01, 2), told(0.3, size_bytes=alone, throttled=not is_known)]
    [by_bin] = losses_of(frame(*rows)).values()
    for place in (MIB, alone):
        [losses] = near(by_bin, size_bin(place)).values()
        shares = {config: loss[0] for config, loss in losses.items()}
        assert shares == {"": 0.2, "Ring/LL/2ch": 0.01}


def test_what_an_h200_lost_foretells_what_its_jobs_gained() -> None:
    """Steps of 29,706 us took 2,636, 1,826 and 1,864 us less with 1, 2 and 4 channels than with 16.

    Medians of two jobs of each (tests/gpu/test_step.py, November 2026): an all-reduce of 16 MiB
    beside eight products of edge 8,192. Of the sweep before them one of two cycles was kept.
    """
    table = pl.read_csv(Path(__file__).parents[1] / "data" / "h200_beside.csv")
    plain = {"interference_kind": "matmul"}
    rows = [
        {**(default() if row["is_default"] else forced("Ring", "Simple")), **plain, **row}
        for row in table.to_dicts()
    ]
    measured = frame(*rows)
    [(_, by_bin)] = losses_of(measured.filter(sweep="channels")).items()
    whole = by_bin[size_bin(64 << 20)]["matmul 8192"]
    means = [whole[f"Ring/Simple/{count}ch"][0] for count in (1, 2, 4, 8, 16)]
    # Not by SMs, of which 16 channels are a quarter, but by waves of tiles.
    assert means == pytest.approx([0.01, 0.07, 0.14, 0.11, 0.16], abs=0.02)
    step = measured.filter(sweep="step")
    [losses] = losses_of(step).values()
    losses_there = losses[size_bin(16 << 20)]
    configs = [ABSTAIN, *(Config(Algorithm.Ring, Protocol.Simple, n) for n in (1, 2, 4))]
    lost, longer = losses_at(losses_there, configs)
    own_us = float(np.median(step.filter("is_default")["time_us"]))
    compute_us = 8 * 2e-6 * 8192**3 / float(np.median(step["compute_alone_tflops"]))
    task = JobTask(("AllReduce", 2, 2, 0), own_us, 0.0, [compute_us], losses_there)
    change = change_of_task_us(longer, lost, task)
    # What is surely gained is gained, and more; and one channel is foretold to be the best.
    gained_us = np.array([2_636.0, 1_826.0, 1_864.0])
    assert change[1] < -500.0
    assert (-change[1:] < gained_us).all()
    assert change.argmin() == 1
