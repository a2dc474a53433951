"""`dynamiccl-collect health` as a person and a Slurm prolog use it: text, JSON, exit code."""

import json
import re
from pathlib import Path

from bench_health import rows

from dynamiccl.datasets import store
from dynamiccl.datasets.rows import measurements_table
from tests.cli.conftest import Shell

ROOT = Path(__file__).resolve().parents[2]


def test_the_example_measures_a_cluster_whose_health_is_exit_code_0(shell: Shell) -> None:
    example = ROOT / "examples" / "health.toml"
    run = shell("dynamiccl-collect", "run", example, "--runner", "simulator", "--out", "well")
    assert run.code == 0, run.err
    done = shell("dynamiccl-collect", "health", "well")
    assert done.code == 0, done.err
    assert "4 nodes: 80 communicators in 100 rows" in done.out
    assert "nothing is slow" in done.out
    assert "not measured" not in done.out


def test_slow_nic_is_exit_code_1_text_and_json(shell: Shell, tmp_path: Path) -> None:
    table = measurements_table(rows(4, "nic:2:1:1.5", gpus=4).to_dicts())
    store.write_part(tmp_path / "data", table, provenance={})
    done = shell("dynamiccl-collect", "health", "data", "--json")
    assert done.code == 1, done.err
    document = json.loads(done.out)
    assert document["is_well"] is False
    [finding] = document["findings"]
    assert (finding["kind"], finding["where"]) == ("nic", "node2 GPU 1")
    assert 0.4 < finding["slower"] < 0.55
    again = shell("dynamiccl-collect", "health", "data")
    assert again.code == 1
    assert re.search(r"nic: node2 GPU 1 (?:4[5-9]|5[0-4])% \(z \d+\)", again.out)
    assert max(map(len, again.out.splitlines())) <= 100
