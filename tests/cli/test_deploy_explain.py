"""`dynamiccl-deploy explain`: a job's calls under an artifact."""

import json
from pathlib import Path

import pytest

from dynamiccl.datasets import store
from dynamiccl.evaluate.gate import pass_gate, write_gated
from dynamiccl.train.policy import TorchPolicy
from tests.calls import call, calls_table, traced
from tests.cli.conftest import Shell, refused
from tests.cli.test_gate import fresh_data

DEPLOY = "dynamiccl-deploy"


@pytest.fixture(name="gated")
def gated_fixture(policy: Path, shell: Shell, tmp_path: Path) -> Path:
    """An artifact that acts at 1 and 4 MiB with Ring/LL, by eight fresh runs of 30 % gain."""
    data = fresh_data(tmp_path / "fresh", 0.3)
    write_gated(pass_gate(TorchPolicy.load(policy), store.read(data)), policy, tmp_path / "gated")
    assert shell(DEPLOY, "export", "gated", "--out", "gated-artifact").code == 0
    return tmp_path / "gated-artifact"


def record(folder: Path, *rows: dict[str, object]) -> Path:
    store.write_part(folder, calls_table(*rows), kind="calls", provenance={})
    return folder


def test_evidence_and_the_way_off_are_told(gated: Path, artifact: Path, shell: Shell) -> None:
    told = shell(DEPLOY, "explain", gated).out
    assert "gated; acts on no machine yet (dynamiccl-deploy bind); on one, in 2 of " in told
    assert "evidence: gate.json" in told
    assert f"touch {gated}/kill" in told
    assert "DYNAMICCL_DISABLE=1" in told
    assert "evidence: none" in shell(DEPLOY, "explain", artifact).out
    (gated / "gate.json").write_text(json.dumps({"cells": [{}]}))
    assert "gate.json" in refused(shell(DEPLOY, "explain", gated), 3)


def test_a_jobs_own_calls_are_told_apart(gated: Path, shell: Shell, tmp_path: Path) -> None:
    plain = {"decided": False, "table": 0, "actual_algorithm": "Tree", "actual_protocol": "LL"}
    data = record(
        tmp_path / "job",
        *(call(i, 100.0, **plain) for i in range(30)),
        *(call(i, 300.0, size_bytes=64 << 20, **plain) for i in range(10)),
        *(call(i, 50.0, num_ranks=16, num_nodes=2, **plain) for i in range(5)),
    )
    found = shell(DEPLOY, "explain", gated, "--calls", data, "--json").json["outlook"]
    assert (found["calls"], found["calls_changed"], found["calls_without_table"]) == (45, 30, 5)
    [change] = found["changes"]
    assert (change["size_bytes"], change["config"], change["ran"]) == (
        1 << 20,
        "Ring/LL",
        "Tree/LL",
    )
    assert change["gain"]["low"] < 0.3 < change["gain"]["high"]
    # 3,000 us of 6,250 us, each 0.3 / 1.3 shorter.
    assert found["saved"]["mean"] == pytest.approx(3000 / 6250 * 0.3 / 1.3, rel=0.05)
    told = shell(DEPLOY, "explain", gated, "--calls", data).out
    assert "worst case: AllReduce of 1048576 bytes, +" in told
    assert "of 45 calls it would decide 30" in told
    # Of calls that took no time no share is saved.
    data = record(tmp_path / "none", call(0, 0.0, decided=False, table=0))
    found = shell(DEPLOY, "explain", gated, "--calls", data, "--json").json["outlook"]
    assert (found["calls_changed"], found["saved"]) == (1, None)


def test_traces_are_placed_as_for_tables(gated: Path, shell: Shell, tmp_path: Path) -> None:
    """Eight unnamed ranks lie on one node, where that alone was measured."""
    rows = (traced(i) for i in range(20))
    others = (traced(i, collective="SendRecv", asks_tuner=False) for i in range(4))
    data = record(tmp_path / "job", *rows, *others)
    explain = (DEPLOY, "explain", gated, "--calls", data)
    done = shell(*explain, "--json")
    found = json.loads(done.out)
    assert (found["outlook"]["calls"], found["outlook"]["calls_changed"]) == (20, 20)
    assert found["calls_left_out"] == 4
    told = shell(*explain).err
    assert "4 calls are left out: NCCL asks no tuner" in told
    for said in (done.err, told):
        assert "ranks of 20 calls lie the traces do not say: taken to be up to 8 a node" in said


def test_what_a_call_took_at_most_is_no_time(gated: Path, shell: Shell, tmp_path: Path) -> None:
    """One rank's time may hold waiting for others."""
    plain = {"decided": False, "table": 0, "time_at_most_us": 200.0}
    data = record(tmp_path / "job", *(call(i, None, **plain) for i in range(3)))
    found = shell(DEPLOY, "explain", gated, "--calls", data, "--json").json["outlook"]
    assert (found["changes"][0]["median_us"], found["saved"]) == (None, None)
    timed = call(3, 100.0, **plain)
    data = record(tmp_path / "one", *(call(i, None, **plain) for i in range(3)), timed)
    [change] = shell(DEPLOY, "explain", gated, "--calls", data, "--json").json["outlook"]["changes"]
    assert (change["calls"], change["median_us"]) == (4, 100.0)
