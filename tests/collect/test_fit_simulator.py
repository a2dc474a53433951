"""The fit: its cells, the numbers it finds, its held-out errors, and data that it refuses."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.collect import fit_simulator as fitting
from dynamiccl.collect.fit_simulator import Cell, Fit, fit_system, read_cells
from dynamiccl.errors import MachineError, NotEnoughData, UnknownName, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.parameters import (
    CellParameters,
    FitParameters,
    FitProfile,
    Origin,
    Rescale,
    SystemFile,
)
from dynamiccl.simulator.systems import shipped_file
from tests.collect.fit_worlds import SIZES, ring_only, rows, store_of
from tests.rows import MIB, default, forced


def described(**rules: object) -> SystemFile:
    file = shipped_file("b300-nvlink")
    return file.model_copy(update={"fit": FitParameters.model_validate(rules)})


def cells(folder: Path, file: SystemFile, *given: dict[str, object]) -> list[Cell]:
    return read_cells(store_of(folder, list(given)), file)[0]


def test_a_cell_is_the_median_of_independent_repeats(tmp_path: Path) -> None:
    rows = [default(t, repeat=n) for n, t in enumerate((100.0, 104.0, 300.0))]
    # The other half of a launch is not another measurement.
    halves = [default(t + 2.0, repeat=n, in_place=True) for n, t in enumerate((100.0, 104.0))]
    [cell] = cells(tmp_path, described(), *rows, *halves)
    assert (cell.config, cell.repeats, cell.time_us) == (ABSTAIN, 3, 105.0)
    assert cell.spread == pytest.approx(300 / 105 - 1)


def test_disturbed_rows_and_excluded_runs_say_nothing(tmp_path: Path) -> None:
    file = described(exclude_runs=["odd"], exclude_forced_of=["wild"])
    rows = [
        default(),
        default(run="odd", size_bytes=2 * MIB),
        default(run="wild", size_bytes=4 * MIB),
        forced("Ring", "LL", run="wild", size_bytes=8 * MIB),
        default(size_bytes=16 * MIB, interference_kind="gemm", interference_level=1.0),
        default(size_bytes=32 * MIB, launch_profile="tuned"),
    ]
    found = cells(tmp_path, file, *rows)
    assert [cell.call.size_bytes for cell in found] == [MIB, 4 * MIB]


def test_sizes_in_another_unit_are_made_bytes(tmp_path: Path) -> None:
    rule = Rescale(runs=("elements",), factor=4, why="float32")
    found = cells(
        tmp_path,
        described(rescale=[rule]),
        default(100.0, size_bytes=4 * MIB),
        default(102.0, run="elements"),
    )
    assert [(cell.call.size_bytes, cell.repeats) for cell in found] == [(4 * MIB, 2)]


def test_a_limit_of_a_profile_is_not_a_request(tmp_path: Path) -> None:
    file = described(profiles={"default": FitProfile(), "few": FitProfile(max_channels=4)})
    limited = forced("Ring", "Simple", channels=4, launch_profile="few", size_bytes=64 << 10)
    asked = forced("Ring", "Simple", channels=4, size_bytes=64 << 10)
    found = {cell.opened: cell for cell in cells(tmp_path, file, limited, asked)}
    assert found[4].config == Config(Algorithm.Ring, Protocol.Simple)
    assert found[None].config.num_channels == 4
    # NCCL's own rule opens a channel for each 32 KiB; a request is spread over all four.
    assert {opened: cell.work.num_channels for opened, cell in found.items()} == {4: 2, None: 4}


def test_more_channels_than_nccl_opens_were_opened_by_somebody(tmp_path: Path) -> None:
    many = forced("Ring", "Simple", channels=48, size_bytes=256 * MIB)
    [cell] = cells(tmp_path, described(), many)
    assert cell.work.num_channels == 48


def test_a_cell_that_nccl_lacks_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [forced("PAT", "Simple"), forced("Ring", "Simple")]
    found, left_out = read_cells(store_of(tmp_path, rows), described())
    assert len(found) == 1
    assert left_out == {"NCCL has no PAT/Simple for AllReduce": 1}


def test_a_protocol_forced_where_nccl_has_it_off_runs_on_a_ring(tmp_path: Path) -> None:
    file = shipped_file("rtx5090-sockets").model_copy(update={"fit": FitParameters()})
    row = forced(None, "LL128", num_nodes=2, ranks_per_node=1, num_ranks=2)
    [cell], left_out = read_cells(store_of(tmp_path, [row]), file)
    assert (cell.key, left_out) == ("Ring/LL128", {})


FREE = ("hop_us", "slice_us", "channel_gbytes_per_s", "overlap")


def fitted(folder: Path, file: SystemFile, *parts: list[dict[str, object]]) -> Fit:
    store_of(folder, *parts)
    return fit_system(file, folder)


def ring(file: SystemFile) -> CellParameters:
    return next(cell for cell in file.cells if cell.key == "Ring/Simple")


def test_numbers_that_made_the_data_are_found_from_others(tmp_path: Path) -> None:
    fit = fitted(tmp_path, ring_only(lambda value: 1.7 * value), rows(noise=0.01))
    truth = shipped_file("b300-nvlink")
    for number in FREE:
        found, true = getattr(ring(fit.file), number), getattr(ring(truth), number)
        assert found.value == pytest.approx(true.value, rel=0.06), number
        assert found.origin is Origin.FITTED
    link = fit.file.links.inside_gbytes_per_s.value
    assert link == pytest.approx(truth.links.inside_gbytes_per_s.value, rel=0.05)
    assert fit.at_bound == []


def test_what_is_a_prior_stays_as_it_was(tmp_path: Path) -> None:
    start = ring_only(lambda value: 1.2 * value)
    fit = fitted(tmp_path, start, rows(noise=0.01))
    assert ring(fit.file).base_us == ring(start).base_us
    others = [cell for cell in start.cells if cell.key != "Ring/Simple"]
    assert [cell for cell in fit.file.cells if cell.key != "Ring/Simple"] == others


def test_a_launch_in_a_bad_state_pulls_little(tmp_path: Path) -> None:
    good = rows(noise=0.01)
    bad = [{**row, "time_us": 4.0 * row["time_us"]} for row in good[::23]]
    clean = [row for index, row in enumerate(good) if index % 23]
    fit = fitted(tmp_path, ring_only(lambda value: 1.2 * value), clean, bad)
    true = ring(shipped_file("b300-nvlink")).channel_gbytes_per_s.value
    assert ring(fit.file).channel_gbytes_per_s.value == pytest.approx(true, rel=0.05)


def test_every_cell_is_predicted_once_by_a_fit_without_it(tmp_path: Path) -> None:
    fit = fitted(tmp_path, ring_only(lambda value: 1.2 * value), rows(noise=0.02))
    cells = [(one.label, one.call.size_bytes) for one in fit.held_out]
    assert len(cells) == len(set(cells)) == len(SIZES) * 4
    errors = fitting.errors_of(fitting.large(fit))
    assert errors["median"] < 0.03
    assert errors["noise"] == pytest.approx(0.02, rel=0.5)
    assert fitting.misses(fit) == []


def test_data_of_another_form_misses_the_bar_and_is_told(tmp_path: Path) -> None:
    # Times that jump by three every second octave are no sum of a latency and a transfer.
    crooked = [
        {**row, "time_us": row["time_us"] * (3.0 if int(np.log2(row["size_bytes"])) % 2 else 1.0)}
        for row in rows()
    ]
    fit = fitted(tmp_path, ring_only(), crooked)
    assert any("median error" in line for line in fitting.misses(fit))
    assert abs(fitting.worst(fit, 1)[0].error) > 0.3


def test_errors_are_grouped_by_size_and_by_config(tmp_path: Path) -> None:
    fit = fitted(tmp_path, ring_only(), rows(noise=0.01))
    sizes = fitting.grouped(fit)["by_size"]
    assert sum(errors["cells"] for errors in sizes.values()) == len(fit.held_out)
    assert sizes["to 64 KiB"]["cells"] == 5 * 4
    configs = fitting.grouped(fit)["by_config"]
    assert set(configs) == {f"AllReduce Ring/Simple/{n}ch" for n in (1, 4, 16, 32)}
    assert {errors["cells"] for errors in configs.values()} == {10}
    document = fitting.to_json(fit)
    assert document["held_out_above_1mib"]["cells"] == 40


def test_a_second_fit_of_the_result_changes_nothing(tmp_path: Path) -> None:
    once = fitted(tmp_path, ring_only(lambda value: 1.3 * value), rows(noise=0.01))
    twice = fit_system(once.file, tmp_path)
    for number in FREE:
        first, second = getattr(ring(once.file), number), getattr(ring(twice.file), number)
        assert first.value == pytest.approx(second.value, rel=1e-2)


def refusal(folder: Path, file: SystemFile, **what: Any) -> str:
    store_of(folder, rows(**what))
    with pytest.raises(NotEnoughData) as refused:
        fit_system(file, folder)
    assert refused.value.exit_code == 3
    return str(refused.value)


def test_one_channel_count_does_not_tell_what_a_channel_moves(tmp_path: Path) -> None:
    said = refusal(tmp_path, ring_only(), channels=(32,))
    assert "Ring/Simple/channel_gbytes_per_s" in said
    assert "num_channels = [1, 2, 4]" in said


def test_fewer_cells_than_numbers_are_too_few(tmp_path: Path) -> None:
    said = refusal(tmp_path, ring_only(), sizes=(MIB,), channels=(1, 32))
    assert "Ring/Simple has 4 numbers to fit (hop_us, slice_us, channel_gbytes_per_s," in said
    assert "only 2 measured cells of 1 sizes" in said


def test_large_sizes_do_not_tell_what_a_hop_costs(tmp_path: Path) -> None:
    large = tuple(size for size in SIZES if size >= 256 * MIB)
    said = refusal(tmp_path, ring_only(), sizes=large, channels=(1, 2, 4))
    assert "Ring/Simple/hop_us" in said
    assert "small sizes" in said


def test_few_channels_do_not_tell_what_the_link_holds(tmp_path: Path) -> None:
    said = refusal(tmp_path, ring_only(), channels=(1, 2))
    assert "links/inside_gbytes_per_s (shows in large sizes inside a node)" in said


def test_pieces_on_one_side_of_a_slice_tell_hop_and_slice_only_together(tmp_path: Path) -> None:
    # Every piece of these sizes is sent in two slices.
    sizes = tuple(size for size in SIZES if size >= 16 * MIB)
    said = refusal(tmp_path, ring_only(), sizes=sizes, channels=(1, 2, 24))
    assert "effects cannot be separated" in said
    assert "Ring/Simple/hop_us" in said
    assert "Ring/Simple/slice_us" in said


def test_without_a_repeat_the_noise_is_not_known(tmp_path: Path) -> None:
    said = refusal(tmp_path, ring_only(), repeats=1)
    assert "no config was measured twice" in said
    assert "cycles = 2" in said


def test_a_description_without_anything_to_fit_is_refused(tmp_path: Path) -> None:
    file = ring_only()
    cells = tuple(cell for cell in file.cells if cell.key != "Ring/Simple")
    fixed = file.model_copy(update={"cells": cells})
    assert "no measurement runs on physics" in refusal(tmp_path, fixed)


def test_several_systems_ask_which(tmp_path: Path) -> None:
    store_of(tmp_path, rows(), rows(system="rack"))
    with pytest.raises(UserError, match="has 2 systems; say which with --system: box, rack"):
        read_cells(tmp_path, ring_only())
    with pytest.raises(UnknownName, match="'shelf'; choose from box, rack"):
        read_cells(tmp_path, ring_only(), ["shelf"])
    assert len(read_cells(tmp_path, ring_only(), ["rack"])[0]) == len(SIZES) * 4


def test_data_of_other_groups_leaves_nothing(tmp_path: Path) -> None:
    away = [{**row, "num_nodes": 2, "num_ranks": 16} for row in rows()]
    store_of(tmp_path, away)
    with pytest.raises(NotEnoughData, match="nothing of box is left to fit 'b300-nvlink' to"):
        read_cells(tmp_path, ring_only())


def test_without_scipy_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_of(tmp_path, rows())
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MachineError, match=r"pip install 'dynamiccl\[train\]'"):
        fit_system(ring_only(), tmp_path)
