"""The fit finds what made the data, and its errors are those of sizes it has not seen."""

from pathlib import Path

import numpy as np
import pytest

from dynamiccl.collect.fitting import report
from dynamiccl.collect.fitting.fit import FOLDS, Fit, fit_system
from dynamiccl.collect.fitting.measured import measured_cells
from dynamiccl.simulator.parameters import CellParameters, Origin, SystemFile
from dynamiccl.simulator.systems import shipped_file
from tests.collect.fitting.worlds import SIZES, ring_only, rows, store_of

FREE = ("hop_us", "slice_us", "channel_gbytes_per_s", "overlap")


def fitted(folder: Path, file: SystemFile, *parts: list[dict[str, object]]) -> Fit:
    store_of(folder, *parts)
    return fit_system(file, measured_cells(folder, file))


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
    assert fit.at_bound == ()


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
    cells = [(one.item.cell.label, one.item.cell.call.size_bytes) for one in fit.held_out]
    assert len(cells) == len(set(cells)) == len(SIZES) * 4
    errors = report.errors_of(report.large(fit))
    assert errors is not None
    assert errors.median < 0.03
    assert errors.noise == pytest.approx(0.02, rel=0.5)
    assert report.misses(fit) == []


def test_data_of_another_form_misses_the_bar_and_is_told(tmp_path: Path) -> None:
    # Times that jump by three every second octave are no sum of a latency and a transfer.
    crooked = [
        {**row, "time_us": row["time_us"] * (3.0 if int(np.log2(row["size_bytes"])) % 2 else 1.0)}
        for row in rows()
    ]
    fit = fitted(tmp_path, ring_only(), crooked)
    assert any("median error" in line for line in report.misses(fit))
    assert abs(report.worst(fit, 1)[0].error) > 0.3


def test_errors_are_grouped_by_size_and_by_config(tmp_path: Path) -> None:
    fit = fitted(tmp_path, ring_only(), rows(noise=0.01))
    sizes = report.by_size(fit)
    assert sum(errors.cells for errors in sizes.values()) == len(fit.held_out)
    assert sizes["to 64 KiB"].cells == 5 * 4
    configs = report.by_config(fit)
    assert set(configs) == {f"AllReduce Ring/Simple/{n}ch" for n in (1, 4, 16, 32)}
    assert {errors.cells for errors in configs.values()} == {10}
    document = report.to_json(fit)
    assert document["held_out_above_1mib"]["cells"] == 40
    assert FOLDS == 3


def test_a_second_fit_of_the_result_changes_nothing(tmp_path: Path) -> None:
    once = fitted(tmp_path, ring_only(lambda value: 1.3 * value), rows(noise=0.01))
    twice = fit_system(once.file, measured_cells(tmp_path, once.file))
    for number in FREE:
        first, second = getattr(ring(once.file), number), getattr(ring(twice.file), number)
        assert first.value == pytest.approx(second.value, rel=1e-2)
