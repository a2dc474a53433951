"""Traces that others published, whole where they are, else what the repository has of them."""

from pathlib import Path

import polars as pl
import pytest

from tests.collect.traces.made import calls_of, read
from tests.published import COPIES, WHOLE, unpacked


@pytest.fixture(name="resnet", params=["whole", "excerpt"])
def resnet_fixture(request: pytest.FixtureRequest) -> Path:
    excerpt = COPIES / "traces" / "hta_nccl_data_excerpt.json.gz"
    if request.param == "excerpt":
        return excerpt
    path = WHOLE / "traces" / "hta_nccl_data.json.gz"
    return path if path.is_file() else excerpt


def test_every_collective_of_resnet_is_there_with_its_arguments(resnet: Path) -> None:
    calls = calls_of(resnet)
    counts = dict(calls["collective"].value_counts().sort("collective").iter_rows())
    assert counts == {"AllReduce": 15, "Broadcast": 6}
    assert calls["size_bytes"].null_count() == 0
    assert calls.filter(pl.col("collective") == "Broadcast")[
        "size_bytes"
    ].unique().sort().to_list() == [
        *(424, 212_480),
    ]
    assert calls["step"].unique().sort().to_list() == [4, 5, 6]
    assert calls["gpu"].unique().to_list() == ["NVIDIA A100-PG509-200"]


def test_one_rank_of_two_gives_upper_bounds_and_no_times(resnet: Path) -> None:
    found = read(resnet)
    assert found.calls["time_us"].null_count == sum(found.untimed.values()) == 21
    assert found.calls["time_at_most_us"].null_count == 0
    # 26 MB as RING_LL with 544 threads is Ring/Simple; nothing is concluded from either.
    calls = pl.DataFrame(found.calls).filter(pl.col("size_bytes") > 20_000_000)
    assert calls["num_threads"].unique().to_list() == [544]
    assert all("RING_LL" in name for name in calls["kernel"])
    assert calls["actual_protocol"].null_count() == calls.height


def test_the_whole_trace_says_how_much_communication_is_exposed() -> None:
    path = WHOLE / "traces" / "hta_nccl_data.json.gz"
    if not path.is_file():
        pytest.skip("the excerpt has no compute kernels")
    steps = pl.DataFrame(read(path).steps)
    assert steps["step_us"].round(0).to_list() == [222_442, 219_727, 224_936]
    assert steps["communication_us"].round(0).to_list() == [11_989, 12_300, 22_587]
    assert steps["exposed_us"].round(0).to_list() == [10_164, 10_540, 18_856]
    busy = pl.col("compute_us") + pl.col("exposed_us") + pl.col("idle_us")
    assert (steps.select(busy).to_series() - steps["step_us"]).abs().max() < 0.01  # type: ignore[operator]


def test_dlrms_ranks_join_by_order_where_their_number_is_told(tmp_path: Path) -> None:
    whole = WHOLE / "traces" / "param_dlrm_kineto.tar.gz"
    excerpt = COPIES / "traces" / "param_dlrm_kineto_excerpt.tar.gz"
    job = unpacked(whole if whole.is_file() else excerpt, tmp_path)
    found = read(job, num_ranks=8)
    calls = pl.DataFrame(found.calls)
    assert calls["ranks_seen"].to_list() == [8] * 8
    assert calls["ranks_timed"].to_list() == [8] * 8
    reduced = calls.filter(pl.col("collective") == "AllReduce")
    assert reduced["size_bytes"].to_list() == [1_576_964, 448, 907_840]
    assert reduced["time_us"].to_list() == [86.0, 20.0, 69.0]
    assert found.steps["rank"].to_pylist() == [*range(8)]
    # Alone, nothing says how many ranks a group has.
    alone = calls_of(job)
    assert set(alone["collective"]) == {"AllReduce", "AlltoAll"}
    assert (alone["size_bytes"].null_count(), alone["num_ranks"].null_count()) == (0, 64)
