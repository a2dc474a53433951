"""Data that cannot tell a number is refused, with the number and what would have to be measured."""

import sys
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.fitting.fit import fit_system
from dynamiccl.collect.fitting.measured import measured_cells
from dynamiccl.errors import MachineError, NotEnoughData, UnknownName, UserError
from dynamiccl.simulator.parameters import SystemFile
from tests.collect.fitting.worlds import SIZES, ring_only, rows, store_of

KIB, MIB = 1 << 10, 1 << 20


def refusal(folder: Path, file: SystemFile, **what: Any) -> str:
    store_of(folder, rows(**what))
    with pytest.raises(NotEnoughData) as refused:
        fit_system(file, measured_cells(folder, file))
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
        measured_cells(tmp_path, ring_only())
    with pytest.raises(UnknownName, match="'shelf'; choose from box, rack"):
        measured_cells(tmp_path, ring_only(), ["shelf"])
    assert len(measured_cells(tmp_path, ring_only(), ["rack"])) == len(SIZES) * 4


def test_data_of_other_groups_leaves_nothing(tmp_path: Path) -> None:
    away = [{**row, "num_nodes": 2, "num_ranks": 16} for row in rows()]
    store_of(tmp_path, away)
    with pytest.raises(NotEnoughData, match="nothing of box is left to fit 'b300-nvlink' to"):
        measured_cells(tmp_path, ring_only())


def test_without_scipy_the_fix_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store_of(tmp_path, rows())
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    with pytest.raises(MachineError, match=r"pip install 'dynamiccl\[train\]'"):
        fit_system(ring_only(), measured_cells(tmp_path, ring_only()))
