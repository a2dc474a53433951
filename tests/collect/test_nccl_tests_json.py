"""`-J` output, from fixtures written by hand (tests/data/README.md).

What each of versions 1 to 3 becomes is in tests/golden/data/logs-json.json, too.
"""

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.datasets import store
from dynamiccl.errors import OutputError

SYSTEM = ImportOptions(system="s")
DATA = Path(__file__).parents[1] / "data"


def changed(tmp_path: Path, **changes: Any) -> Path:
    content = json.loads((DATA / "nccl_tests_v3.json").read_text())
    path = tmp_path / "changed.json"
    path.write_text(json.dumps({**content, **changes}))
    return path


def test_secrets_are_not_kept(tmp_path: Path) -> None:
    secrets = ("hush", "AWS_SECRET", "HF_TOKEN", "alice", "agent", "PLUGIN")
    summary = import_files([DATA / "nccl_tests_v1.json"], tmp_path, options=SYSTEM)
    frame = store.read(tmp_path)
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
