"""`-J` output, from fixtures written by hand (tests/data/README.md).

What each of versions 1 to 3 becomes is in tests/golden/data/logs-json.json, too.
"""

import json
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow.parquet as pq
import pytest

from dynamiccl.collect.imports import ImportOptions, ImportSummary, import_files
from dynamiccl.datasets import store
from dynamiccl.errors import CorruptFile, OutputError

SYSTEM = ImportOptions(system="s")
DATA = Path(__file__).parents[1] / "data"


def load(name: str, out: Path) -> tuple[ImportSummary, pl.DataFrame]:
    summary = import_files([DATA / name], out, options=SYSTEM)
    return summary, store.read(out).sort("size_bytes", "in_place")


def changed(tmp_path: Path, **changes: Any) -> Path:
    content = json.loads((DATA / "nccl_tests_v3.json").read_text())
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**content, **changes}))
    return path


def test_version_1_with_its_misspelt_keys(tmp_path: Path) -> None:
    summary, frame = load("nccl_tests_v1.json", tmp_path)
    assert (summary.rows_read, summary.measurements_written, summary.dropped) == (2, 4, 0)
    assert frame["status"].to_list() == ["ok", "ok", "wrong_values", "wrong_values"]
    assert frame["time_us"].to_list() == [50.0, 55.0, 80.0, 88.0]
    assert frame["busbw_gbytes_per_s"].null_count() == 1  # "nan"
    first = frame.row(0, named=True)
    assert (first["collective"], first["num_ranks"], first["num_nodes"]) == ("AllReduce", 4, 2)
    assert (first["nccl_version"], first["root"]) == ("2.29.7", -1)
    assert first["source"] == "nccl-tests-json"
    assert (first["gpu"], first["statistic"]) == ("NVIDIA H100 80GB HBM3", "mean")
    # Of the environment config and profile are kept.
    assert (first["requested_algorithm"], first["requested_protocol"]) == ("Ring", "Simple")
    assert (first["requested_num_channels"], first["is_default"]) == (8, False)
    assert (first["launch_profile"], first["default_scope"]) == ("buffsize=8388608", "profile")


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    secrets = ("hush", "AWS_SECRET", "HF_TOKEN", "alice", "agent", "PLUGIN")
    summary, frame = load("nccl_tests_v1.json", tmp_path)
    stored = [str(row) for row in frame.rows()] + [json.dumps(summary.to_json())]
    stored += [str(store.provenance_of(tmp_path))]
    for part in store.part_paths(tmp_path):
        stored += [str(part.read_bytes()), str(pq.read_schema(part).metadata)]
    assert not [secret for secret in secrets if any(secret in text for text in stored)]


def test_what_a_config_leaves_out_is_the_usual(tmp_path: Path) -> None:
    import_files([changed(tmp_path, config={})], tmp_path / "out", options=SYSTEM)
    row = store.read(tmp_path / "out").row(0, named=True)
    assert (row["launch_profile"], row["is_default"], row["num_ranks"]) == ("default", True, None)
    unusual = {"graph": 1, "unalign": 1, "aggregated_iterations": 2}
    import_files([changed(tmp_path, config=unusual)], tmp_path / "other", options=SYSTEM)
    [profile] = store.read(tmp_path / "other")["launch_profile"].unique()
    assert profile == "agg_iters=2,graph=1,unalign=1"


def test_cut_off_json_names_the_byte(tmp_path: Path) -> None:
    path = tmp_path / "crashed.json"
    path.write_bytes((DATA / "nccl_tests_v3.json").read_bytes()[:700])
    with pytest.raises(CorruptFile, match=r"not whole JSON: .* \(char \d+\) of 700"):
        import_files([path], tmp_path / "out", options=SYSTEM)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"version": 4}, "version: Input should be 1, 2 or 3 .*import the text output instead"),
        ({"results": None}, "results: Input should be a valid list"),
        ({"results": []}, "holds no usable row"),
        ({"results": [7, {"size": "x"}]}, r"results\[0\]"),
        (
            {"results": [{"size": 8, "out_of_place": {"cpu_time": 1.0}}]},
            "cpu_time: Input should be",
        ),
        ({"results": [{"size": 8, "in_place_per_iter": {"times_us": 1.0}}]}, "a valid list"),
        (
            {"results": [{"size": 8, "in_place": {"time": 9, "alg_bw": 7, "bus_bw": 7}}]},
            "8 bytes in 9.0 us are not 7.0 GB/s",
        ),
        ({"results": [{"size": 8, "root": "9e30"}]}, "root: Input should be"),
        ({"results": [{"size": 1 << 62}]}, "size: Input should be less than"),
        ({"results": [{"size": 8, "in_place": {"time": [1.0]}}]}, "time: Input should be a valid"),
        ({"results": [{"size": 8, "in_place": {"nwrong": -1}}]}, "nwrong: Input should be greater"),
    ],
)
def test_other_json_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(OutputError, match=message):
        import_files([changed(tmp_path, **changes)], tmp_path / "o", options=SYSTEM)


def test_deep_nesting_is_corrupt(tmp_path: Path) -> None:
    path = tmp_path / "deep.json"
    path.write_text('{"args":' + "[" * 200_000)
    with pytest.raises(CorruptFile):
        import_files([path], tmp_path / "out", options=SYSTEM)
