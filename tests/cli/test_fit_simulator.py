"""`dynamiccl-collect fit-simulator` from the outside."""

from pathlib import Path

import pytest

from dynamiccl.simulator.systems import find_system, system_text
from tests.cli.conftest import Shell
from tests.collect.test_fit_simulator import ring_only, rows, store_of

FIT = ("dynamiccl-collect", "fit-simulator", "--data", "data")


@pytest.fixture(name="base")
def base_fixture(tmp_path: Path) -> Path:
    """Measurements in `data`, and the description to start from."""
    store_of(tmp_path / "data", rows(noise=0.01))
    path = tmp_path / "base.toml"
    path.write_text(system_text(ring_only(lambda value: 1.5 * value)), encoding="utf-8")
    return path


def test_a_fitted_file_is_a_system_to_sweep_on(shell: Shell, base: Path, tmp_path: Path) -> None:
    done = shell(*FIT, "--base", base, "--out", "mine.toml")
    assert done.code == 0
    assert "above 1 MiB" in done.out
    assert "mine -> mine.toml" in done.out
    assert find_system(str(tmp_path / "mine.toml")).name == "mine"
    sweep = tmp_path / "on_mine.toml"
    sweep.write_text(
        'name = "s"\nsystem = "mine"\ncollectives = ["AllReduce"]\n'
        "groups = [{ num_nodes = 1, ranks_per_node = 8 }]\n"
        'sizes = { list = ["1M"] }\nprotocols = ["LL"]\nalgorithms = ["Ring"]\n'
        '[simulator]\nsystem = "mine.toml"\n'
    )
    ran = shell("dynamiccl-collect", "run", sweep, "--runner", "simulator", "--out", "o", "--json")
    assert ran.json["rows_by_status"] == {"ok": 15}
    assert shell("dynamiccl-collect", "plan", sweep, "--json").json["system"] == "mine"
