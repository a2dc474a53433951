"""Two NCCL releases asked about the same calls, and their choices in a sweep's times."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.rows import measurements_table
from dynamiccl.datasets.store import write_part
from dynamiccl.errors import NotEnoughData, UnknownName, UserError
from dynamiccl.evaluate.upgrade.changes import Decisions, Release, decide
from dynamiccl.evaluate.upgrade.measured import Measured, MeasuredTimes
from dynamiccl.evaluate.upgrade.points import Point, Points, called, grid
from dynamiccl.evaluate.upgrade.shown import Limits, Upgrade
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, NcclVersion, Protocol
from dynamiccl.simulator.default.constants import READ
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.systems import find_cost_model, find_system
from tests.calls import call, calls_frame, calls_table
from tests.cli.conftest import Shell
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414

SHAPE = Group(4, 8)
TRACE = Path(__file__).parents[1] / "data" / "traces" / "hta_nccl_data_excerpt.json.gz"
#: A config that is neither choice.
OTHER = Config(Algorithm.Ring, Protocol.LL, 1)
LIMITS = Limits(least=0.01, model_error=0.15)


def release(version: str, system: str = "h100-ib") -> Release:
    parsed = NcclVersion.parse(version)
    return Release(find_cost_model(system, parsed), find_system(system, parsed))


def decided(old: str, new: str, points: Points) -> Decisions:
    return decide(points, release(old), release(new))


@pytest.fixture(scope="module")
def found() -> Decisions:
    """AllReduce of four H100 nodes: below 4 MiB NVLSTree is left, above 256 MiB it is taken."""
    return decided("2.27.5", "2.29.7", grid([SHAPE], [Collective.AllReduce]))


def test_a_release_decides_like_itself_and_2_30_7_on_h100_like_2_29_7() -> None:
    points = grid([SHAPE], Collective.__members__.values())
    tuned = Points([p for p in points.points if p.call.collective.tunable], {})
    assert decided("2.27.5", "2.27.5", tuned).ranges == []
    same = decided("2.29.7", "2.30.7", tuned)
    assert (same.asked, same.ranges) == (5 * 41, [])


def test_every_point_that_changes_is_in_one_range_and_no_other(found: Decisions) -> None:
    models = [find_cost_model("h100-ib", NcclVersion.parse(v)) for v in ("2.27.5", "2.29.7")]
    expected = {}
    for point in grid([SHAPE], [Collective.AllReduce]).points:
        old, new = (model.resolve(point.call, ABSTAIN) for model in models)
        if old != new:
            expected[point.call.size_bytes] = (old, new)
    listed = [(c.point.call.size_bytes, (c.old, c.new)) for c in found.changed]
    assert dict(listed) == expected
    assert len(listed) == len(expected) > 0
    for each in found.ranges:
        assert len({(c.old.algorithm, c.new.algorithm) for c in each.points}) == 1


@pytest.mark.parametrize("version", ["2.29.5", "2.30.4", "2.31.2", "2.26.2"])
def test_a_release_whose_constants_nobody_read_is_refused_with_the_choices(version: str) -> None:
    assert NcclVersion.parse(version) not in READ
    with pytest.raises(UnknownName, match=rf"'{version}'; choose from 2.27.3, .*2.30.7"):
        find_cost_model("b300-nvlink", NcclVersion.parse(version))


def test_each_choice_is_timed_with_its_own_channels() -> None:
    """2.29.2 uses fewer channels for small calls; 2.28.9's are not cut down to them."""
    points = grid([Group(4, 1)], [Collective.AllGather])
    releases = [release(version, "gb10-roce") for version in ("2.28.9", "2.30.7")]
    changed = decide(points, *releases).changed
    assert changed
    assert all(each.old.num_channels > each.new.num_channels for each in changed)  # type: ignore[operator]
    assert all(each.old_us != each.new_us for each in changed)


def rows(old: Config, new: Config, sizes: Sequence[int], ratio: float, runs: int) -> pl.DataFrame:
    """A sweep that holds both configs at those sizes, with 1 % of noise that a run shares."""
    random = np.random.default_rng(5)
    held = []
    for run in range(runs):
        shared = np.exp(random.normal(0.0, 0.1))
        for size in sizes:
            for config, factor in ((old, 1.0), (new, ratio)):
                assert config.algorithm is not None
                assert config.protocol is not None
                held.append(
                    {
                        "system": "mine",
                        "source": "nccl-tests-json",
                        "sweep": "s",
                        "trial": config.key,
                        "run": str(run),
                        "nccl_version": "2.27.5",
                        "num_nodes": 4,
                        "ranks_per_node": 8,
                        "num_ranks": 32,
                        "collective": "AllReduce",
                        "size_bytes": size,
                        "requested_algorithm": config.algorithm.wire,
                        "requested_protocol": config.protocol.wire,
                        "requested_num_channels": config.num_channels,
                        "status": "ok",
                        "time_us": 100.0 * factor * shared * np.exp(random.normal(0.0, 0.01)),
                    }
                )
    return pl.DataFrame(measurements_table(held))


def times(frame: pl.DataFrame) -> MeasuredTimes:
    return MeasuredTimes(frame, "h100-ib", lambda version: find_cost_model("h100-ib", version))


def test_a_range_that_a_sweep_holds_has_its_measured_change_and_interval(found: Decisions) -> None:
    change = found.ranges[-1]
    sizes = [c.point.call.size_bytes for c in change.points][:2]
    measured = times(rows(change.points[0].old, change.points[0].new, sizes, 1.1, 6)).of(change)
    assert measured is not None
    assert measured.points == 2
    assert measured.low is not None
    assert measured.high is not None
    assert measured.low < 0.1 < measured.high < measured.low + 0.05
    assert times(rows(change.points[0].old, OTHER, sizes, 1.1, 6)).of(change) is None


def test_one_run_gives_a_change_and_no_interval(found: Decisions) -> None:
    change = found.ranges[-1]
    size = change.points[0].point.call.size_bytes
    frame = rows(change.points[0].old, change.points[0].new, [size], 1.1, 1)
    measured = times(frame).of(change)
    assert measured is not None
    assert measured.low is None
    assert measured.mean == pytest.approx(0.1, abs=0.05)
    assert measured.text.endswith("(no interval)")


def test_channels_left_to_nccl_are_those_of_the_sweeps_release(found: Decisions) -> None:
    """Asked for without a count, under 2.27.5: the old choice's own, and not 2.29.7's."""
    alone = next(r for r in found.ranges if r.points[0].old.algorithm == r.points[0].new.algorithm)
    point = alone.points[0]
    left = Config(point.old.algorithm, point.old.protocol)
    size = point.point.call.size_bytes
    assert times(rows(left, point.new, [size], 1.2, 3)).of(alone) is not None
    assert times(rows(point.old, left, [size], 1.2, 3)).of(alone) is None


def test_sweeps_of_several_systems_none_of_that_name_are_refused() -> None:
    frame = rows(OTHER, OTHER, [1024], 1.0, 1)
    other = frame.with_columns(system=pl.lit("yours"))
    with pytest.raises(UserError, match="mine, yours, and none of them is called h100-ib"):
        times(pl.concat([frame, other]))


@pytest.mark.parametrize(
    ("measured", "is_slower"),
    [
        (Measured(1, 0.05, 0.04, 0.06, 1e-6), True),
        (Measured(1, 0.05, -0.01, 0.11, 0.08), False),
        (Measured(1, 0.005, 0.004, 0.006, 1e-6), False),
        (Measured(1, -0.05, -0.06, -0.04, 1e-6), False),
        (Measured(1, 0.5), False),
    ],
)
def test_a_measured_range_is_slower_by_its_measurement_alone(
    measured: Measured, is_slower: bool, found: Decisions
) -> None:
    one = Decisions(1, 0, found.ranges[:1], {})
    judged = Upgrade(("a", "b"), "s", one, [measured], ["2.27.5"], LIMITS)
    assert any(judged.slower) == is_slower


def test_a_range_not_measured_is_slower_as_modelled_beyond_the_models_error() -> None:
    """AllReduce of five GPUs of an H100 node, from NVLS to Ring: 17 % longer by the tables."""
    changes = decided("2.27.5", "2.29.7", grid([Group(1, 5)], [Collective.AllReduce]))
    by_limit = {
        limit: any(Upgrade(("a", "b"), "s", changes, nothing, [], Limits(0.01, limit)).slower)
        for limit in (0.15, 0.5)
        if (nothing := [None] * len(changes.ranges))
    }
    assert by_limit == {0.15: True, 0.5: False}


def test_calls_are_asked_about_by_their_own_sizes_and_the_rest_is_counted() -> None:
    shape = {"num_ranks": 32, "num_nodes": 4, "ranks_per_node": 8}
    frame = calls_frame(
        call(0, size_bytes=3_000_000, **shape),
        call(1, size_bytes=3_000_000, **shape),
        call(2, collective="SendRecv", **shape),
        call(3, num_ranks=1, num_nodes=1),
        call(4, num_ranks=16, num_nodes=None),
        call(5, asks_tuner=False, **shape),
    )
    points = called(frame)
    assert points.points == [Point(Call(SHAPE, Collective.AllReduce, 3_000_000), 2)]
    assert points.left_out == {
        "not a call that NCCL's cost model decides": 2,
        "one rank": 1,
        "the number of nodes is not known (add --ranks-per-node)": 1,
    }
    assert Call(Group(2, 8), Collective.AllReduce, 1 << 20) in {
        point.call for point in called(frame, 8).points
    }
    changes = decided("2.27.5", "2.29.7", points)
    assert (changes.asked, changes.calls, len(changes.changed)) == (1, 2, 1)
    with pytest.raises(NotEnoughData, match="1 x 9 is no shape of h100-ib"):
        decided("2.27.5", "2.29.7", grid([Group(1, 9)], [Collective.AllReduce]))


def test_the_command_says_it_in_one_sentence_and_a_table_of_100_columns(
    found: Decisions, shell: Shell, tmp_path: Path
) -> None:
    change = found.ranges[-1].points[0]
    frame = rows(change.old, change.new, [change.point.call.size_bytes], 1.1, 5)
    write_part(tmp_path / "sweeps", measurements_table(frame.to_dicts()), provenance={})
    ask = ["dynamiccl-evaluate", "upgrade", "--from", "2.27.5", "--to", "2.29.7"]
    ask += ["--system", "h100-ib", "--nodes", "4", "--ranks-per-node", "8"]
    plain = shell(*ask)
    assert plain.code == 0
    first, *table = plain.out.splitlines()
    assert first.startswith("2.27.5 -> 2.29.7 on h100-ib: NCCL chooses otherwise at 12 of 205 ")
    assert max(map(len, table)) <= 100
    slower = shell(*ask, "--data", "sweeps", "--out", "o", "--json")
    assert slower.code == 1
    said = json.loads(slower.out)
    assert said == {
        **json.loads((tmp_path / "o" / "upgrade.json").read_text()),
        "page": said["page"],
    }
    assert sum(each["is_slower"] for each in said["ranges"]) == 1
    assert "NVLSTree/Simple" in (tmp_path / "o" / "upgrade.html").read_text()


def test_the_command_takes_recorded_calls_and_traces(shell: Shell, tmp_path: Path) -> None:
    calls = calls_table(call(0, size_bytes=3_000_000, num_ranks=32, num_nodes=4))
    write_part(tmp_path / "job", calls, provenance={}, kind="calls")
    ask = ["dynamiccl-evaluate", "upgrade", "--from", "2.27.7", "--to", "2.29.7"]
    recorded = shell(*ask, "--system", "h100-ib", "--calls", "job")
    assert "1 of 1 (shape, size) points" in recorded.out
    assert "100.0% of the job's 1 calls" in recorded.out
    traced = shell(
        *ask, "--system", "a100-nvswitch", "--trace", str(TRACE), "--ranks-per-node", "8"
    )
    assert "of the job's 21 calls" in traced.out
