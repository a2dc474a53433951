"""`dynamiccl-deploy` on an artifact, and `dynamiccl-evaluate explain` on what is in it."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from dynamiccl.datasets import store
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.store import measurements_table
from dynamiccl.sizes import size_bin
from tests.cli.conftest import Shell, refused
from tests.policies import hand_made_manifest
from tests.rows import default, forced, frame


def test_export_describes_the_artifact(artifact: Path, policy: Path, shell: Shell) -> None:
    done = shell("dynamiccl-deploy", "export", policy, "--out", "again", "--json")
    assert "passed no gate" in done.err
    exported = json.loads(done.out)
    explained = shell("dynamiccl-deploy", "explain", artifact, "--json").json
    assert exported["tables"] == explained["tables"]
    [table] = exported["tables"]
    assert (table["system"], table["num_nodes"], table["num_ranks"]) == ("box", 1, 8)
    assert table["acting"] > 0
    assert exported["warnings"] == ["no machine is bound to box: its tables act nowhere"]
    told = shell("dynamiccl-deploy", "export", policy, "--out", "third").err
    assert "no machine is bound to box: its tables act nowhere; " in told
    assert "third --system box" in told


def test_table_says_what_the_policy_decides(artifact: Path, shell: Shell) -> None:
    table = ("dynamiccl-deploy", "table", artifact, "--group", "1x8")
    decisions = shell(*table, "--json").json["decisions"]
    at = {row["size_bytes"]: row["config"] for row in decisions["AllReduce"]}
    # The catalogue is ABSTAIN, Tree/LL, Ring/LL: the policy takes the last one.
    assert at[1 << 20] == at[1 << 22] == "Ring/LL"
    assert {row["config"] for row in decisions["Broadcast"]} == {None}
    last = max(row["last_byte"] for row in decisions["AllReduce"] if row["config"] == "Ring/LL")
    assert size_bin(1 << 22) == size_bin(last) == size_bin(last + 1) - 1
    shown = shell(*table).out
    assert f" {last} " in shown.replace("\u2502", " ")


def test_a_policy_must_be_torchscript(policy: Path, shell: Shell, tmp_path: Path) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "policy.pt").write_bytes(b"not a network")
    Manifest.read(policy).write(tmp_path / "bad")
    line = refused(shell("dynamiccl-deploy", "export", "bad", "--out", "o"), 3)
    assert "policy.pt is not a TorchScript file" in line


@pytest.mark.usefixtures("data")
def test_a_policy_of_other_features_is_refused(policy: Path, shell: Shell, tmp_path: Path) -> None:
    manifest = Manifest.read(policy)
    shutil.copytree(policy, tmp_path / "old")
    replace(manifest, features=manifest.features[1:]).write(tmp_path / "old")
    for line in (
        "dynamiccl-deploy export old --out o",
        "dynamiccl-evaluate explain old --collective AllReduce --size 1M --group 1x8",
        "dynamiccl-evaluate report --data data --policy old --out o",
        "dynamiccl-evaluate gate --data data --policy old --out o",
    ):
        assert "are not those of this release; train again" in refused(shell(*line.split()), 3)


def test_it_is_said_where_the_channels_of_nccl_are_not_known(
    policy: Path, shell: Shell, tmp_path: Path
) -> None:
    """Else a report credits gains that no table can ever take."""
    rows = [
        row
        for k in range(20, 24)
        for row in (
            default(100.0, size_bytes=1 << k),
            forced("Ring", "LL", 80.0, channels=8, size_bytes=1 << k),
            forced("Tree", "LL", 90.0, channels=8, size_bytes=1 << k),
        )
    ]
    store.write_part(tmp_path / "data", measurements_table(rows), provenance={})
    shutil.copytree(policy, tmp_path / "asks")
    noise = frame().select("system", "collective", noise_band="time_us")
    hand_made_manifest(frame(*rows), noise).write(tmp_path / "asks")
    unread = "NCCL's own channels were not read back: import a log of its default"
    told = "1x8: tables may not hold 2 of 2 configs, which ask for channels; " + unread
    assert unread in shell(*EXPLAIN, "asks", *ASK[:2], "--group", "1x8", "--size", "4M").out
    assert told in shell("dynamiccl-deploy", "export", "asks", "--out", "o").err
    report = ("dynamiccl-evaluate", "report", "--data", "data", "--policy", "asks", "--out", "r")
    found = shell(*report, "--json").json["systems"]["box"]
    assert "less time" in found["sentences"]["hand-made"]
    assert any(told in line for line in found["verdicts"])


EXPLAIN = ("dynamiccl-evaluate", "explain")
ASK = ("--collective", "AllReduce", "--group", "4x8", "--size")


def test_it_says_what_the_table_says(gated_dir: Path, shell: Shell, tmp_path: Path) -> None:
    artifact = tmp_path / "artifact"
    assert shell("dynamiccl-deploy", "export", gated_dir, "--out", artifact).code == 0
    told = shell(*EXPLAIN, artifact, *ASK, "4M").out
    nowhere = re.search(r"no machine is bound to (\S+): its tables act nowhere; on a node", told)
    assert nowhere
    bind = ("dynamiccl-deploy", "bind", artifact, "--system", nowhere[1])
    assert " ".join(map(str, bind)) in told
    assert shell(*bind, "--fingerprint", "gpu=none*0;mig=0;nic=socket*1;nccl=22809").code == 0
    assert "no machine" not in shell(*EXPLAIN, artifact, *ASK, "4M").out
    table = ("dynamiccl-deploy", "table", tmp_path / "artifact", "--group", "4x8")
    rows = shell(*table, "--json").json["decisions"]["AllReduce"]
    said = set()
    for row in rows[::5]:
        found = shell(*EXPLAIN, gated_dir, *ASK, row["size_bytes"], "--json").json
        assert found["chosen"] == (row["config"] or "ABSTAIN")
        assert (found["first_byte"], found["last_byte"]) == (row["first_byte"], row["last_byte"])
        assert found["reason"].startswith("acts" if row["config"] else "abstains")
        ratios = [each["time_over_default"] for each in found["predictions"]]
        assert ratios == sorted(ratios)
        said.add(found["reason"].partition(":")[0])
        gate = found["gate"]
        assert row["config"] is None or gate["verdict"] in {"passed", "inferred"}
    assert said == {"acts", "abstains"}
