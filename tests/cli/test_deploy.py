"""`dynamiccl-deploy` on an artifact: what it prints, and how it refuses a damaged one."""

import json
from pathlib import Path

import pytest

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.sizes import size_bin
from tests.cli.conftest import Shell, refused


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
    decisions = shell(*table).json["decisions"]
    at = {row["size_bytes"]: row["config"] for row in decisions["AllReduce"]}
    # The catalogue is ABSTAIN, Tree/LL, Ring/LL: the policy takes the last one.
    assert at[1 << 20] == at[1 << 22] == "Ring/LL"
    assert {row["config"] for row in decisions["Broadcast"]} == {None}
    last = max(row["last_byte"] for row in decisions["AllReduce"] if row["config"] == "Ring/LL")
    assert size_bin(1 << 22) == size_bin(last) == size_bin(last + 1) - 1
    shown = shell(*table, "--format", "table").out
    assert f" {last} " in shown.replace("\u2502", " ")
    written = shell(*table, "--format", "nccl-csv")
    assert written.code == 0
    assert "allreduce" in written.out
    # Whoever hands it to an older example tuner gets a segmentation fault, in every rank of a job.
    assert (
        "takes it from NCCL 2.30 on; those of 2.27 to 2.29 crash at the first line" in written.err
    )


@pytest.mark.parametrize(
    "name",
    ["policy.pt", "brain.pt", "manifest.json", "tables/box/nodes1_ranks8.dct", "plugin.index"],
)
@pytest.mark.parametrize(
    "arguments",
    [("install", "--to", "o"), ("table", "--group", "1x8"), ("bind",)],
    ids=str,
)
def test_artifact_with_a_damaged_file_is_exit_3(
    name: str, arguments: tuple[object, ...], artifact: Path, shell: Shell
) -> None:
    content = bytearray((artifact / name).read_bytes())
    content[len(content) // 2 if name != "manifest.json" else 0] ^= 0x01
    (artifact / name).write_bytes(bytes(content))
    subcommand, *options = arguments
    line = refused(shell("dynamiccl-deploy", subcommand, artifact, *options), 3)
    assert str(artifact / name) in line


def test_policy_that_is_no_torchscript_is_exit_3(
    policy: Path, shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "policy.pt").write_bytes(b"not a network")
    Manifest.read(policy).write(tmp_path / "bad")
    line = refused(shell("dynamiccl-deploy", "export", "bad", "--out", "o"), 3)
    assert "policy.pt is not a TorchScript file" in line
