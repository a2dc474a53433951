"""The import as a whole: options, systems, provenance, repetition; and nccl-tests' `-J` output."""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.collect.nccl_tests import load_systems
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError, UserError
from tests.collect.parsed import imported

LOG = (
    "# nThread 1 nGpus 8 minBytes 8 maxBytes 64\n"
    "1048576  262144  float  sum  -1  100.0  10.49  18.35  0  102.0  10.28  17.99  0\n"
)


@pytest.fixture(name="log")
def log_fixture(tmp_path: Path) -> Path:
    path = tmp_path / "nightly runs" / "job7.log"
    path.parent.mkdir()
    path.write_text(LOG)
    return path


def test_same_file_twice_is_taken_once(log: Path, tmp_path: Path) -> None:
    copy = log.with_name("copy.log")
    copy.write_text(LOG)
    summary = import_files([log, copy], tmp_path / "out", options=ImportOptions(system="s"))
    assert summary.measurements_written == 2
    assert "the same bytes as" in summary.files[1].remarks[0]
    again = import_files([log], tmp_path / "out", options=ImportOptions(system="s"))
    rows = store.read(tmp_path / "out")
    assert (again.already_there, rows.height) == (2, 2)
    assert rows["sweep"].unique().to_list() == ["nightly-runs"]
    assert rows["source_file"].unique().to_list() == [str(log)]
    assert rows["run"][0].startswith("job7-")
    document = json.loads(json.dumps(again.to_json(), allow_nan=False))
    assert (document["measurements_written"], document["files"][0]["rejected"]) == (2, 0)
    (record,) = store.provenance_of(tmp_path / "out")
    assert (record["tool"], len(record["files"]["job7.log"])) == ("import", 64)


def test_systems_file_sets_topology_and_name(log: Path, tmp_path: Path) -> None:
    systems = tmp_path / "systems.toml"
    systems.write_text(
        '[systems.s]\nname = "short"\ncompute_capability = 9.0\nnvswitch = true\nnic_kind = "efa"\n'
    )
    _, [row, _] = imported(log, systems_file=systems)
    assert (row["system"], row["compute_capability"]) == ("short", 9.0)
    assert (row["nvswitch"], row["nic_kind"], row["cpu_vendor"]) == (True, "efa", None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[systems.s]\nnvlink = 5", r"systems\.s\.nvlink: Extra .*with any of name, compute_cap"),
        ('[systems.s]\nnic_kind = "token ring"', r"nic_kind: .*\(got 'token ring'\)"),
        ('[systems.s]\nname = "a b"', "cannot be a directory name"),
        ("[systems.s", "no TOML: Expected"),
    ],
)
def test_wrong_systems_file(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "systems.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        load_systems(path)


DATA = Path(__file__).parents[1] / "data"


def changed(**changes: Any) -> str:
    """A whole JSON output with other keys."""
    content = json.loads((DATA / "nccl_tests_v3.json").read_text())
    return json.dumps({**content, **changes})


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    secrets = ("hush", "AWS_SECRET", "HF_TOKEN", "alice", "agent", "PLUGIN")
    source, options = DATA / "nccl_tests_v1.json", ImportOptions(system="s")
    summary = import_files([source], tmp_path, options=options)
    frame = store.read(tmp_path)
    stored = [str(row) for row in frame.rows()] + [json.dumps(summary.to_json())]
    stored += [str(store.provenance_of(tmp_path))]
    for part in store.part_paths(tmp_path):
        stored += [str(part.read_bytes()), str(pq.read_schema(part).metadata)]
    assert not [secret for secret in secrets if any(secret in text for text in stored)]


def test_what_a_config_leaves_out_is_the_usual(tmp_path: Path) -> None:
    _, [row, *_] = imported(tmp_path / "a.json", changed(config={}))
    assert (row["launch_profile"], row["is_default"], row["num_ranks"]) == ("default", True, None)
    unusual = {"graph": 1, "unalign": 1, "aggregated_iterations": 2}
    (tmp_path / "b").mkdir()
    _, rows = imported(tmp_path / "b" / "b.json", changed(config=unusual))
    assert {row["launch_profile"] for row in rows} == {"agg_iters=2,graph=1,unalign=1"}


def row(**keys: Any) -> dict[str, Any]:
    return {"results": [{"size": 8, **keys}]}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 4}, "version: Input should be 1, 2 or 3 .*import the text output instead"),
        ({"results": None}, "results: Input should be a valid list"),
        ({"results": []}, "holds no usable row"),
        ({"results": [7, {"size": "x"}]}, r"results\[0\]"),
        (row(out_of_place={"cpu_time": 1.0}), "cpu_time: Input should be"),
        (row(in_place_per_iter={"times_us": 1.0}), "a valid list"),
        (row(in_place={"time": 9, "alg_bw": 7, "bus_bw": 7}), "8 bytes in 9.0 us are not 7.0 GB/s"),
        (row(in_place={"nwrong": -1}), "nwrong: Input should be greater"),
    ],
)
def test_other_json_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=message):
        imported(tmp_path / "changed.json", changed(**changes))
