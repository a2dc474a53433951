"""`dynamiccl-evaluate job`: page, JSON, plan and exit codes, on stores of calls."""

import json
from pathlib import Path

from dynamiccl.datasets.store import measurements_table, write_part
from tests.calls import calls_table, traced
from tests.cli.conftest import Shell
from tests.evaluate.test_job import sweep
from tests.rows import MIB


def stored(
    at: Path, best_us: float = 80.0, source: str = "nccl-tests-text", **columns: object
) -> None:
    rows = [traced(i, 100.0, num_nodes=1, **columns) for i in range(12)]
    write_part(at / "job", calls_table(*rows), kind="calls", provenance={})
    measured = sweep(best_us, source=source)
    write_part(at / "data", measurements_table(measured.to_dicts()), provenance={})


def test_a_gain_is_told_with_a_page_and_data(shell: Shell, tmp_path: Path) -> None:
    stored(tmp_path)
    done = shell("dynamiccl-evaluate", "job", "job", "--data", "data", "--out", "o")
    assert (done.code, done.err) == (0, "")
    assert "would save 20.0 %" in done.out.splitlines()[0]
    page = (tmp_path / "o" / "job.html").read_text()
    assert "would save 20.0 %" in page
    assert "prefers-color-scheme: dark" in page
    assert "http://" not in page.replace("http://www.w3.org", "")
    assert "https://" not in page
    assert "<script" not in page
    told = json.loads((tmp_path / "o" / "job.json").read_text())
    assert told["verdict"] == "gain"
    [kind] = told["kinds"]
    assert kind["better_config"] == "Ring/LL"
    assert kind["gain"]["mean"] > 0.19


def test_of_a_trace_without_times_no_ms_are_told(shell: Shell, tmp_path: Path) -> None:
    rows = [traced(i, None, num_nodes=1, size_bytes=64 * MIB) for i in range(12)]
    stored(tmp_path)
    write_part(tmp_path / "untimed", calls_table(*rows), kind="calls", provenance={})
    line = ("dynamiccl-evaluate", "job")
    told = shell(*line, "untimed", "--data", "data", "--out", "o", "--json").json
    assert told["whole_us"] is None
    page = (tmp_path / "o" / "job.html").read_text()
    assert " ms<" not in page
    assert "100.0 % of the time" in page
    assert "100.0 %        -" in shell(*line, "untimed", "--data", "data").out
    assert shell(*line, "job", "--data", "data", "--out", "o", "--json").json["whole_us"] == 1200.0
    assert "1.20 ms<" in (tmp_path / "o" / "job.html").read_text()


def test_rows_without_a_group_shape_are_no_fault(shell: Shell, tmp_path: Path) -> None:
    """As of a CSV without num_nodes: alone, and beside rows that have one."""
    stored(tmp_path)
    rows = sweep(ranks_per_node=None, num_nodes=None, sweep="csv")
    for data, verdict in (("bare", "cannot-tell"), ("data", "gain")):
        write_part(tmp_path / data, measurements_table(rows.to_dicts()), provenance={})
        done = shell("dynamiccl-evaluate", "job", "job", "--data", data, "--json")
        assert (done.code, done.json["verdict"]) == (0, verdict)


def test_a_policy_is_told_beside_the_table(shell: Shell, policy: Path, tmp_path: Path) -> None:
    """The hand-made policy takes the highest action, Ring/LL, which is slower here."""
    stored(tmp_path, 120.0)
    told = shell(
        "dynamiccl-evaluate", "job", "job", "--data", "data", "--policy", policy, "--json"
    ).json
    assert set(told["arms"]) == {"policy", "table"}
    assert round(told["arms"]["policy"]["communication"]["mean"], 3) == -0.2
    assert told["arms"]["table"]["communication"]["mean"] == 0.0
    assert told["verdict"] == "nothing"


def test_a_simulated_sweep_is_marked_as_modelled(shell: Shell, tmp_path: Path) -> None:
    stored(tmp_path, source="simulator")
    line = ("dynamiccl-evaluate", "job", "job", "--data", "data")
    assert shell(*line, "--json").json["modelled"]
    assert "modelled" in shell(*line, "--out", "o").out
    assert "modelled, not measured" in (tmp_path / "o" / "job.html").read_text()
