"""`dynamiccl-evaluate gate`, and what `dynamiccl-deploy export` says of policies without one."""

from pathlib import Path

import polars as pl

from dynamiccl.datasets import store
from dynamiccl.datasets.schema import MEASUREMENTS
from dynamiccl.datasets.store import measurements_table
from tests.cli.conftest import Shell, refused
from tests.conftest import Trained
from tests.data_sets import SWEEP
from tests.evaluate.test_gate import runs


def fresh_data(folder: Path, gain: float) -> Path:
    rows = [{**row, "sweep": "fresh"} for row in runs(gain, sizes=[1 << 20, 1 << 22])]
    store.write_part(folder, measurements_table(rows), provenance={})
    return folder


def test_what_a_gate_let_through_acts(policy: Path, shell: Shell, tmp_path: Path) -> None:
    data = fresh_data(tmp_path / "fresh", 0.3)
    gate = ("dynamiccl-evaluate", "gate", "--data", data, "--policy", policy)
    found = shell(*gate, "--out", "gated", "--json").json
    assert found["counts"]["passed"] == 2
    assert all(cell["gain"] > 0.2 for cell in found["cells"] if cell["verdict"] == "passed")
    table = shell(*gate, "--out", "again")
    assert "AllReduce" in table.out
    assert "could not be looked for" in table.out
    assert "refused" in table.out
    assert "is not empty" in refused(shell(*gate, "--out", "gated"), 2)
    exported = shell("dynamiccl-deploy", "export", "gated", "--out", "artifact", "--json")
    assert exported.json["tables"][0]["acting"] == 2
    assert "no gate" not in exported.err
    bare = shell("dynamiccl-deploy", "export", policy, "--out", "bare", "--json")
    assert "passed no gate" in bare.err
    gate = (*gate[:2], "--data", fresh_data(tmp_path / "none", 0.0), "--policy", policy)
    assert shell(*gate, "--out", "nothing", "--json").json["counts"]["passed"] == 0
    exported = shell("dynamiccl-deploy", "export", "nothing", "--out", "idle", "--json")
    assert "its tables act at no size: every job keeps NCCL's own choice" in exported.out


def test_gate_plans_its_sweep(trained: Trained, shell: Shell, tmp_path: Path) -> None:
    policy, data_dir = trained.policy, trained.data
    (tmp_path / "sweep.toml").write_text(SWEEP, encoding="utf-8")
    gate = ("dynamiccl-evaluate", "gate", "--policy", policy, "--plan", "fresh.toml")
    full = (*gate, "--sweep", "sweep.toml", "--known", data_dir)
    found = shell(*full)
    assert "\n 3 runs, " in found.out
    assert "% of the gain" in found.out
    assert "dynamiccl-collect run fresh.toml" in found.out
    assert "exists already" in refused(shell(*full), 2)
    run = ("dynamiccl-collect", "run", "fresh.toml", "--runner", "simulator", "--out", "fresh")
    assert shell(*run).code == 0
    judge = ("dynamiccl-evaluate", "gate", "--policy", policy, "--data", "fresh", "--json")
    judged = shell(*judge, "--known", data_dir, "--out", "gated").json
    assert judged["counts"]["passed"] > 0
    assert judged["is_compared"]
    same = store.read(data_dir).with_columns(sweep=pl.lit("another")).to_arrow()
    store.write_part(tmp_path / "same", same.cast(MEASUREMENTS), provenance={})
    again = ("dynamiccl-evaluate", "gate", "--policy", policy, "--data", "same", "--out", "no")
    assert "/another/" in refused(shell(*again), 3)
