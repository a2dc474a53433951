"""From rows to cells: repeats, halves of a launch, units, limits of a profile."""

from pathlib import Path

import pytest

from dynamiccl.collect.fitting.measured import MeasuredCell, measured_cells
from dynamiccl.collect.fitting.problem import make_items
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.simulator.parameters import FitParameters, FitProfile, Rescale, SystemFile
from dynamiccl.simulator.systems import parametric_system, shipped_file
from tests.collect.fitting.worlds import store_of
from tests.rows import MIB, default, forced


def described(**rules: object) -> SystemFile:
    file = shipped_file("b300-nvlink")
    return file.model_copy(update={"fit": FitParameters.model_validate(rules)})


def cells(folder: Path, file: SystemFile, *given: dict[str, object]) -> list[MeasuredCell]:
    return measured_cells(store_of(folder, list(given)), file)


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
    items, left_out = make_items(parametric_system(file), list(found.values()))
    counts = {item.cell.opened: item.work.num_channels for item in items}
    # NCCL's own rule opens a channel for each 32 KiB; a request is spread over all four.
    assert counts == {4: 2, None: 4}
    assert left_out == {}


def test_more_channels_than_nccl_opens_were_opened_by_somebody(tmp_path: Path) -> None:
    many = forced("Ring", "Simple", channels=48, size_bytes=256 * MIB)
    [item], _ = make_items(parametric_system(described()), cells(tmp_path, described(), many))
    assert item.work.num_channels == 48


def test_a_cell_that_nccl_lacks_is_left_out_and_counted(tmp_path: Path) -> None:
    rows = [forced("PAT", "Simple"), forced("Ring", "Simple")]
    items, left_out = make_items(
        parametric_system(described()), cells(tmp_path, described(), *rows)
    )
    assert len(items) == 1
    assert left_out == {"NCCL has no PAT/Simple for AllReduce": 1}


def test_a_protocol_forced_where_nccl_has_it_off_runs_on_a_ring(tmp_path: Path) -> None:
    file = shipped_file("rtx5090-sockets").model_copy(update={"fit": FitParameters()})
    row = forced(None, "LL128", num_nodes=2, ranks_per_node=1, num_ranks=2)
    [item], left_out = make_items(parametric_system(file), cells(tmp_path, file, row))
    assert (item.key, left_out) == ("Ring/LL128", {})
