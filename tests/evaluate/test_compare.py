"""Two sweeps against each other: in the simulator, where it is known what changed."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.datasets.store import read, write_part
from dynamiccl.errors import NotEnoughData
from dynamiccl.evaluate.compare.changes import find_changes
from dynamiccl.evaluate.compare.choices import why
from dynamiccl.evaluate.compare.paired import CELL, pair
from dynamiccl.evaluate.compare.shown import compare
from tests.cli.conftest import Shell, refused
from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414

SWEEP = """
name = "NAME"
system = "h100-ib-simulated"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "Tree", "NVLSTree"]
groups = [{ num_nodes = 4, ranks_per_node = 8 }]
sizes = { min = "1K", max = "1G", factor = 2 }
nccl_version = "2.27.5"
cycles = 5

[simulator]
seed = SEED
noise_sigma = 0.02
"""
Sweeps = Callable[[int], pl.DataFrame]


def made(folder: Path, seed: int) -> pl.DataFrame:
    simulate(SWEEP.replace("NAME", f"s{seed}").replace("SEED", str(seed)), folder)
    return read(folder)


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> Sweeps:
    """Like sweeps by seed, 2 % of noise and one launch in some hundred slow by a multiple."""
    known: dict[int, pl.DataFrame] = {}

    def sweep(seed: int) -> pl.DataFrame:
        if seed not in known:
            known[seed] = made(tmp_path_factory.mktemp("sweep"), seed)
        return known[seed]

    return sweep


def slowed(frame: pl.DataFrame, where: pl.Expr, factor: float) -> pl.DataFrame:
    time = pl.when(where).then(pl.col("time_us") * factor).otherwise(pl.col("time_us"))
    return frame.with_columns(time_us=time)


IN_RING = (pl.col("requested_algorithm") == "Ring") & (pl.col("requested_protocol") == "Simple")
LARGE = pl.col("size_bytes") > 4 << 20


def test_like_sweeps_are_told_to_be_alike(sweeps: Sweeps) -> None:
    for seed in range(6):
        found = find_changes(pair(sweeps(2 * seed), sweeps(2 * seed + 1)))
        assert not found.is_changed
        assert not found.is_slower
        assert abs(found.common.mean) < 0.02


@pytest.mark.parametrize(("factor", "is_slower"), [(1.04, True), (0.96, False)])
def test_a_config_that_changed_at_large_sizes_is_found(
    factor: float, is_slower: bool, sweeps: Sweeps
) -> None:
    after = slowed(sweeps(1), IN_RING & LARGE, factor)
    paired = pair(sweeps(0), after)
    found = find_changes(paired)
    assert found.is_changed
    assert found.is_slower == is_slower
    lines = {(s.line["requested_algorithm"], s.line["requested_protocol"]) for s in found.stretches}
    assert lines == {("Ring", "Simple")}
    assert all(s.first_bytes > 4 << 20 for s in found.stretches)
    for stretch in found.stretches:
        assert stretch.change.low < factor - 1.0 < stretch.change.high


def test_scattered_cells_are_more_than_chance_gives(sweeps: Sweeps) -> None:
    """6 % slower, one cell in ten, anywhere."""
    keys = sweeps(0).select(CELL).unique().sort(CELL, nulls_last=True)
    taken = np.random.default_rng(3).choice(keys.height, keys.height // 10, replace=False)
    bad = keys[taken].with_columns(bad=pl.lit(True))
    after = sweeps(1).join(bad, on=list(CELL), how="left", nulls_equal=True)
    after = slowed(after, pl.col("bad").fill_null(value=False), 1.06).drop("bad")
    paired = pair(sweeps(0), after)
    found = find_changes(paired)
    assert found.more_slower > 5
    assert found.more_faster == 0
    named = paired.cells[found.found].join(bad, on=list(CELL), how="semi", nulls_equal=True)
    assert named.height >= 0.8 * len(found.found) > 0


def test_what_all_cells_share_is_told_as_one_change(sweeps: Sweeps) -> None:
    found = find_changes(pair(sweeps(0), slowed(sweeps(1), pl.lit(value=True), 1.1)))
    assert found.common_is_real
    assert found.is_slower
    assert found.common.low < 0.1 < found.common.high
    assert not found.found


def test_another_choice_of_nccl_is_told_from_a_slower_config(sweeps: Sweeps) -> None:
    """NCCL goes over from whatever it took to Ring/LL, at a cost."""
    is_own = pl.col("is_default") & (pl.col("collective") == "AllReduce") & LARGE
    after = slowed(sweeps(1), is_own, 1.3).with_columns(
        actual_algorithm=pl.when(is_own).then(pl.lit("Ring")).otherwise("actual_algorithm"),
        actual_protocol=pl.when(is_own).then(pl.lit("LL")).otherwise("actual_protocol"),
    )
    found = compare(("old", "new"), sweeps(0), after, 0.05, 0.01)
    others = [each for each in found.choices if each.is_other]
    assert len(others) == 8
    assert all(each.got_slower and each.restored_by for each in others)
    assert all("NCCL chooses otherwise" in why(each, found.changes) for each in others)
    assert any("the old choice takes what it took" in why(each, found.changes) for each in others)
    slow = slowed(sweeps(1), LARGE & (pl.col("is_default") | IN_RING), 1.2)
    same = compare(("a", "b"), sweeps(0), slow, 0.05, 0.01).choices
    assert same
    assert all("the same choice takes longer" in why(each, found.changes) for each in same)


def test_sweeps_that_share_nothing_or_have_one_run_say_so(sweeps: Sweeps) -> None:
    one = sweeps(0).filter(pl.col("run") == sweeps(0)["run"][0])
    with pytest.raises(NotEnoughData, match="cycles = 3 or more"):
        pair(one, sweeps(1))
    other = sweeps(1).with_columns(system=pl.lit("elsewhere"))
    with pytest.raises(NotEnoughData, match="system is h100-ib-simulated in one and elsewhere"):
        pair(sweeps(0), other)


def test_the_command_has_a_page_json_and_an_exit_code(
    sweeps: Sweeps, shell: Shell, tmp_path: Path
) -> None:
    after = slowed(sweeps(1), IN_RING & LARGE, 1.05)
    for name, frame in (("before", sweeps(0)), ("after", after)):
        write_part(tmp_path / name, measurements_table(frame.to_dicts()), provenance={})
    done = shell("dynamiccl-evaluate", "compare", "before", "after", "--out", "o")
    assert done.code == 1
    assert "stretches of sizes got slower" in done.out
    page = (tmp_path / "o" / "compare.html").read_text()
    assert "Ring/Simple" in page
    assert "<svg" in page
    assert json.loads((tmp_path / "o" / "compare.json").read_text())["is_slower"]
    back = shell("dynamiccl-evaluate", "compare", "after", "before", "--json")
    assert back.code == 0
    told = json.loads(back.out)
    assert told["is_changed"]
    assert not told["is_slower"]
    assert shell("dynamiccl-evaluate", "compare", "before", "before").code == 0
    assert "no data directory at gone" in refused(
        shell("dynamiccl-evaluate", "compare", "before", "gone"), 2
    )
