"""What `describe` says of data, and its pictures: where which config is best, and by how much."""

import sys
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dynamiccl import cli
from dynamiccl.collect.describe import (
    both_sides,
    crossovers,
    describe,
    draw_both_sides,
    lines,
    plot_systems,
)
from dynamiccl.datasets.store import measurements_table, write_part
from dynamiccl.errors import NotEnoughData
from dynamiccl.sizes import size_label
from tests.rows import MIB, default, forced, frame


def summaries(directory: Path, *rows: dict[str, Any]) -> dict[str, dict[str, Any]]:
    write_part(directory, measurements_table(rows), provenance={})
    return {summary["system"]: summary for summary in describe(directory)}


def test_system_where_nothing_worked_is_described(tmp_path: Path) -> None:
    found = summaries(tmp_path, default(None, status="failed"))["box"]
    assert (found["rows"], found["rows_with_time"], found["verified_share"]) == (1, 0, 0.0)
    only_failed = frame(default(None))
    with pytest.raises(NotEnoughData, match="no quiet task of a tuned collective has a time"):
        plot_systems(only_failed, tmp_path / "plots")
    assert not (tmp_path / "plots").exists()


def test_rows_of_unwell_gpus_are_shown_and_in_no_verdict(tmp_path: Path) -> None:
    hot = [default(50.0 * i, repeat=i, throttled=True) for i in (1, 2, 3)]
    erring = forced("Ring", "LL", 9.0, ecc_errors=4)
    found = summaries(tmp_path, default(), *hot, erring, forced("Tree", "LL", throttled=False))
    assert (found["box"]["rows"], found["box"]["rows_with_time"]) == (6, 2)
    assert found["box"]["rows_left_out"] == {"throttled": 3, "ecc_errors": 1}
    assert (found["box"]["num_configs"], found["box"]["noise_bands"]) == (1, {})
    text = lines(found["box"])["rows"]
    assert text == "6 (6 ok); 2 with a time, left out: 3 throttled, 1 ecc_errors"
    own, ring = default(100.0), forced("Ring", "LL", 90.0)
    for flags in ({"throttled": True}, {"ecc_errors": 1}):
        slow = default(150.0, repeat=2, aa_noise_band=0.5, **flags)
        told = only(own, slow, ring, forced("Tree", "LL", 1, **flags))
        assert (told["best"], told["default_us"], told["noise_band"]) == ("Ring/LL", 100.0, None)
        assert only(slow, ring)["default_us"] is None


def only(*rows: dict[str, Any]) -> dict[str, Any]:
    [found] = crossovers(frame(*rows)).to_dicts()
    return found


def test_gain_is_over_the_untouched_default_beyond_noise() -> None:
    pair = [default(100.0, aa_noise_band=0.3), default(150.0, repeat=1, aa_noise_band=0.3)]
    found = only(*pair, forced("Ring", "LL", 100.0, aa_noise_band=0.3))
    assert found["noise_band"] == 0.3
    assert found["gain"] == 0.25
    assert not found["beyond_noise"]
    repeats = [{**row, "aa_noise_band": None} for row in pair]
    assert only(*repeats, forced("Ring", "LL", 50.0))["noise_band"] == 0.5
    unknown = only(default(100.0), forced("Ring", "LL", 99.0))
    assert (unknown["noise_band"], unknown["beyond_noise"]) == (None, True)
    # Nor over the default under our plugin.
    found = only(default(100.0), default(60.0, default_scope="profile"), forced("Ring", "LL", 80.0))
    assert (found["best"], found["default_us"]) == ("Ring/LL", 100.0)


def grid(system: str, **columns: Any) -> list[dict[str, Any]]:
    """Where the best config changes, and NCCL's default is best in the middle."""
    return [
        row
        for size, ring, tree in ((1024, 5.0, 9.0), (65536, 21.0, 25.0), (MIB, 19.0, 12.0))
        for row in (
            default(20.0, size_bytes=size, system=system, **columns),
            default(20.4, size_bytes=size, repeat=1, system=system, **columns),
            forced("Ring", "LL", ring, size_bytes=size, system=system, channels=4, **columns),
            forced("Tree", "Simple", tree, size_bytes=size, system=system, **columns),
        )
    ]


PNG = b"\x89PNG\r\n\x1a\n"


@pytest.mark.usefixtures("drawn")
def test_each_system_has_a_picture_with_something_in_it(tmp_path: Path) -> None:
    rows = [
        *grid("box"),
        *grid("box", launch_profile="net", in_place=True, datatype="half"),
        *grid("rack.7", num_nodes=None, ranks_per_node=None),
    ]
    paths = plot_systems(frame(*rows), tmp_path / "new" / "plots")
    assert paths == [tmp_path / "new" / "plots" / f"{name}.png" for name in ("box", "rack.7")]
    for path in paths:
        content = path.read_bytes()
        assert content.startswith(PNG)
        # A blank page of this size is compressed to some 5 kB.
        assert len(content) > 15_000
    assert paths[0].read_bytes() != paths[1].read_bytes()


def beside(make: Any, *words: Any, loss_us: float, edge: float = 4096.0, **more: Any) -> Any:
    """A row that knows both sides; `words` are those of `make`, with the time last."""
    columns = {"interference_kind": "matmul", "interference_level": edge}
    return make(*words, compute_loss_us=loss_us, **columns, **more)


def test_front_of_both_sides_is_what_nothing_beats_in_both() -> None:
    rows = [
        beside(default, 100.0, loss_us=40.0, actual_num_channels=24),
        beside(forced, "Ring", "LL", 90.0, loss_us=30.0, channels=8),
        beside(forced, "Ring", "LL", 110.0, loss_us=30.0, channels=6),
        beside(forced, "Ring", "LL", 120.0, loss_us=8.0, channels=2),
        beside(forced, "Ring", "LL", 140.0, loss_us=16.0, channels=2, repeat=1),
        # Another edge is another task, and calls alone have no such side.
        beside(forced, "Ring", "LL", 80.0, loss_us=1.0, edge=2048.0),
        default(20.0),
    ]
    found = both_sides(frame(*rows)).filter(interference_level=4096.0)
    columns = ("requested_num_channels", "time_us", "compute_loss_us", "on_front")
    assert found.select(columns).rows() == [
        (8, 90.0, 30.0, True),
        (None, 100.0, 40.0, False),
        (6, 110.0, 30.0, False),
        (2, 130.0, 12.0, True),
    ]


def test_picture_of_both_sides_names_the_front_and_nccls_own(tmp_path: Path) -> None:
    rows = [
        beside(forced, "Ring", "LL", 100.0 + n, loss_us=50.0 - n, channels=n, edge=edge)
        for n in range(1, 21)
        for edge in (2048.0, 4096.0)
    ]
    rows += [beside(default, 100.0, loss_us=55.0, actual_num_channels=24)]
    paths = plot_systems(frame(*rows), tmp_path)
    assert [path.name for path in paths] == ["box-beside.png"]
    first, second = draw_both_sides("box", both_sides(frame(*rows))).axes
    assert first.get_title() == "AllReduce 1x8, 1M, matmul 4096"
    names = [text.get_text() for text in first.texts]
    assert names == [*(f"Ring/LL/{n}ch" for n in range(1, 21, 4)), "NCCL's own, 24ch"]
    assert [text.get_text() for text in second.texts] == names[:-1]


def test_sizes_are_said_as_people_say_them() -> None:
    sizes = (1023, 1472, 1000 << 10, (1 << 20) - 1, 3 << 29)
    assert [*map(size_label, sizes)] == ["1023", "1.44K", "1000K", "1024K", "1.5G"]


def test_fix_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for module, extra in (("matplotlib.figure", "plot"), ("scipy.optimize", "train")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(SystemExit, match="4"):
            cli.run(partial(import_module, module))
        assert f"pip install '.[{extra}]'" in capsys.readouterr().err
