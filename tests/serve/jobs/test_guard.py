"""The guard: NCCL's own choice is measured now and then, and stands where it is faster."""

from statistics import median

import numpy as np
import pytest

from dynamiccl.collect.calls import FLAG_PROBE
from dynamiccl.nccl import Algorithm, Protocol
from dynamiccl.sizes import size_bin
from tests.serve.jobs.conftest import Player
from tests.serve.jobs.play import at
from tests.serve.jobs.setting import Setting
from tests.serve.jobs.watching import metrics_of, records_of

#: The guard's own: times of a task before it is judged, and what counts as noise.
NEEDED, NOISE = 8, 0.05
GUARDED = {"DYNAMICCL_SAMPLE_PERCENT": "100", "DYNAMICCL_PROBE_CALLS": "400"}
#: A few questions again and again, so that there are enough times of each; a record is a call.
FEW_QUESTIONS = {"rate": 1500, "calls": 9000, "max_group": 1, "pattern": 12}


def slow(algorithm: Algorithm, protocol: Protocol, factor: float) -> tuple[str, str]:
    return "--slow", f"{int(algorithm)}:{int(protocol)}:{factor}"


@pytest.mark.parametrize(
    ("algorithm", "protocol"),
    [
        pytest.param(Algorithm.Ring, Protocol.LL128, id="ours-is-slow", marks=pytest.mark.soak),
        pytest.param(Algorithm.NVLS, Protocol.Simple, id="own-is-slow"),
    ],
)
def test_choices_are_withdrawn_where_they_are_slower_and_nowhere_else(
    algorithm: Algorithm, protocol: Protocol, play_job: Player, four_ranks: Setting
) -> None:
    calls_dir = four_ranks.root / "calls"
    played = play_job(
        *slow(algorithm, protocol, 5),
        environment=four_ranks.environment() | GUARDED | {"DYNAMICCL_CALLS_DIR": str(calls_dir)},
        ranks=4,
        **FEW_QUESTIONS,
    )
    assert played.is_sound, played
    assert "choices withdrawn: collective" in played.log
    records = records_of(calls_dir, 0)
    timed = records[records["start_ns"] > 0]
    withdrawn = kept = 0
    for collective, size_bytes in sorted(
        {(int(r["collective"]), int(r["size_bytes"])) for r in timed}
    ):
        same = timed[(timed["collective"] == collective) & (timed["size_bytes"] == size_bytes)]
        took_us = (same["stop_ns"] - same["start_ns"]) / 1000
        ours, own = took_us[same["decided"] == 1], took_us[same["decided"] == 0]
        if len(ours) < 2 * NEEDED or len(own) < 2 * NEEDED:
            continue
        # The last calls outside of probes: what was chosen in the end.
        in_the_end = same[same["flags"] & FLAG_PROBE == 0][-1]
        if median(ours) > median(own) * (1 + NOISE):
            assert not in_the_end["decided"], (collective, size_bin(size_bytes))
            withdrawn += 1
        else:
            assert in_the_end["decided"], (collective, size_bin(size_bytes))
            kept += 1
    assert withdrawn > 0
    assert kept > 0 or algorithm is Algorithm.Ring


def test_without_probes_nothing_is_judged(play_job: Player, four_ranks: Setting) -> None:
    played = play_job(
        *slow(Algorithm.Ring, Protocol.LL128, 5),
        environment=four_ranks.environment() | GUARDED | {"DYNAMICCL_PROBE_CALLS": "0"},
        ranks=4,
        rate=1500,
        calls=4000,
    )
    assert played.is_sound, played
    assert played.switches == 1
    assert "withdrawn" not in played.log


def test_probes_take_the_share_of_the_calls_that_was_asked_for(
    play_job: Player, four_ranks: Setting
) -> None:
    calls_dir = four_ranks.root / "calls"
    # 64 calls in so many: 1 % with the 6400 of the default, here a tenth.
    probe_calls = 640
    chosen = {
        "DYNAMICCL_PROBE_CALLS": str(probe_calls),
        "DYNAMICCL_CALLS_DIR": str(calls_dir),
        "DYNAMICCL_SAMPLE_PERCENT": "10",
    }
    played = play_job(
        environment=four_ranks.environment() | chosen, ranks=4, rate=1500, calls=10_000, max_group=1
    )
    assert played.is_sound, played
    is_probe = records_of(calls_dir, 0)["flags"] & FLAG_PROBE != 0
    edges = np.flatnonzero(np.diff(is_probe.astype(int))) + 1
    starts, ends = edges[::2], edges[1::2]
    assert len(starts) >= 2
    # Each probe is paid for before the next one.
    for start, end, following in zip(starts, ends, starts[1:], strict=False):
        pause = following - end
        assert pause >= probe_calls
        assert (end - start) <= 1.1 * 64 / probe_calls * pause + 1


@pytest.mark.parametrize("percent", ["0.1", "100"])
def test_what_stops_cost_keeps_probes_away(
    percent: str, play_job: Player, four_ranks: Setting
) -> None:
    """Ranks that are milliseconds apart wait for each other at each stop."""
    metrics, kept = four_ranks.root / "metrics", four_ranks.root / "kept"
    metrics.mkdir()
    chosen = {"DYNAMICCL_METRICS_DIR": str(metrics), "DYNAMICCL_PROBE_CALLS": "64"}
    played = play_job(
        *at(2300, f"sh=cp -r {metrics} {kept}"),
        environment=four_ranks.environment()
        | GUARDED
        | chosen
        | {"DYNAMICCL_STOP_PERCENT": percent},
        ranks=4,
        rate=500,
        calls=2400,
        jitter_us=1000,
        max_group=1,
    )
    assert played.is_sound, played
    values = [metrics_of(path.read_text()) for path in kept.glob("*.prom")]
    agreed = max(
        value
        for of in values
        for (name, _), value in of.items()
        if name == "dynamiccl_proposals_agreed"
    )
    # The table, and a few more before it was known what they cost.
    assert (agreed < 8) == (percent == "0.1"), agreed
