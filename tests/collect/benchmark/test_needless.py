"""Trials that are not measured: too slow to ever win, or the same as another one."""

from pathlib import Path

import polars as pl
import pytest

from dynamiccl.collect.benchmark.needless import Needless
from dynamiccl.collect.benchmark.read_back import PlainChoice
from dynamiccl.collect.grid import Trial
from tests.collect.benchmark.stand_in import rows, run
from tests.collect.benchmark.sweeps import sweep

CHANNELS = sweep(num_channels="[0, 1, 8, 16, 32]", sizes='{ list = ["1M", "256M"] }')


def trial(config: str, size_bytes: int = 1 << 20) -> Trial:
    [found] = [t for t in CHANNELS.trials if t.config.key == config and t.size_bytes == size_bytes]
    return found


def known(slow_max_bytes: int = 64 << 20) -> Needless:
    needless = Needless(slow_max_bytes)
    needless.know(CHANNELS.trials)
    return needless


@pytest.mark.parametrize(
    ("config", "slow"),
    [
        ("Ring/LL", True),
        ("Ring/LL/32ch", True),
        ("Ring/Simple/1ch", True),
        ("Ring/Simple/8ch", False),
        ("Ring/Simple", False),
        ("ABSTAIN", False),
    ],
)
def test_slowest_configs_are_left_out_above_a_size(config: str, slow: bool) -> None:
    reason = known().reason(trial(config, 256 << 20), {})
    assert (reason is not None) == slow
    assert reason is None or "runner.slow_max" in reason
    assert known().reason(trial(config, 1 << 20), {}) is None
    assert known(16 << 30).reason(trial(config, 256 << 20), {}) is None


def ran(config: str, channels: int) -> tuple[str, PlainChoice]:
    return trial(config).key, ["Ring", "Simple", channels]


def test_channel_counts_that_run_alike_are_measured_once() -> None:
    choices: dict[str, PlainChoice | None] = dict(
        [ran("Ring/Simple/8ch", 8), ran("Ring/Simple/16ch", 12), ran("Ring/Simple/32ch", 12)]
    )
    reasons = {
        name: known().reason(trial(f"Ring/Simple{name}"), choices)
        for name in ("", "/1ch", "/8ch", "/16ch", "/32ch")
    }
    assert reasons.pop("/32ch") == "NCCL runs it as Ring/Simple/16ch, which is measured"
    assert set(reasons.values()) == {None}


def test_the_count_that_really_runs_is_the_one_that_is_measured() -> None:
    choices: dict[str, PlainChoice | None] = dict(
        [ran("Ring/Simple/8ch", 16), ran("Ring/Simple/16ch", 16)]
    )
    assert known().reason(trial("Ring/Simple/16ch"), choices) is None
    assert "Ring/Simple/16ch" in (known().reason(trial("Ring/Simple/8ch"), choices) or "")


def test_what_was_not_read_back_or_at_another_size_is_measured() -> None:
    key, choice = ran("Ring/Simple/16ch", 16)
    choices: dict[str, PlainChoice | None] = {key: choice, trial("Ring/Simple/32ch").key: None}
    for config, size in (("Ring/Simple/32ch", 1 << 20), ("Ring/Simple/32ch", 256 << 20)):
        assert known().reason(trial(config, size), choices) is None


def test_sweep_of_channel_counts_leaves_out_what_runs_alike(
    tmp_path: Path, sweep_path: Path
) -> None:
    # NCCL clamps what a tuner asks for to the channels that it made.
    few = '[{ name = "few", env = { NCCL_MAX_NCHANNELS = "8" } }]'
    made = sweep(
        algorithms='["Ring"]',
        protocols='["Simple"]',
        num_channels="[4, 8, 64]",
        profiles=few,
        cycles="1",
    )
    run(made, tmp_path, sweep_path)
    found = rows(tmp_path).filter(~pl.col("is_default"))
    by_count = {key[0]: part for key, part in found.group_by("requested_num_channels")}
    assert [set(by_count[count]["status"]) for count in (4, 8, 64)] == [
        {"ok"},
        {"ok"},
        {"infeasible"},
    ]
    reason = "NCCL runs it as Ring/Simple/8ch, which is measured"
    assert set(by_count[64]["reason"]) == {reason}
