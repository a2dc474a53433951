import json
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.collect.grid import Trial
from dynamiccl.collect.outcomes import Outcome
from dynamiccl.collect.runner import (
    Launch,
    LaunchResult,
    Measured,
    Quarantined,
    Round,
    Row,
    Runner,
)
from dynamiccl.collect.runs.run import RunSummary, Shard, run_sweep
from dynamiccl.collect.simulated.runner import SimulatorRunner
from dynamiccl.collect.sweep import Sweep, parse_sweep
from dynamiccl.collect.trial_rows import pick_row
from dynamiccl.datasets import store
from dynamiccl.datasets.schema import REQUESTED_COLUMNS, Source
from dynamiccl.errors import InvalidSweep, UserError
from tests.collect.cycles import Cycles

TEXT = """
name = "grid"
system = "sim"
collectives = ["AllReduce", "AllGather"]
algorithms = ["Ring", "NVLSTree"]
protocols = ["LL", "Simple"]
groups = [{ num_nodes = 2, ranks_per_node = 8 }]
sizes = { min = "1M", max = "4M" }
cycles = 3
"""
#: 3 sizes x 2 collectives x (default twice, Ring/LL, Ring/Simple) and NVLSTree/Simple of AllReduce.
PICKS, INFEASIBLE = 3 * (2 * 4 + 1), 3 * 3


def sweep(text: str = TEXT) -> Sweep:
    return parse_sweep(text, where="s.toml")


def run(
    out: Path,
    made: Sweep | None = None,
    *,
    resume: bool = False,
    runner: Runner | None = None,
    **more: Any,
) -> RunSummary:
    made = made or sweep()
    strategy = Cycles(made.trials, made.file.cycles)
    runner = runner or SimulatorRunner(made.file)
    return run_sweep(made, strategy, runner, out, resume=resume, **more)


COLUMNS = ("trial", "run", "repeat", "round", "launch", "status", "time_us")


def figures(out: Path, columns: Sequence[str] = COLUMNS) -> list[tuple[object, ...]]:
    return sorted(store.read(out).select(columns).rows(), key=str)


def parts(out: Path) -> list[Path]:
    return store.part_paths(out)


class Interrupted(Exception):
    """Ends a sweep as a crash would."""


class StopsAfter(SimulatorRunner):
    """The simulator on a machine that goes down in the middle of a launch."""

    def __init__(self, made: Sweep, picks: int) -> None:
        super().__init__(made.file)
        self._left = picks
        self.seen: list[str] = []

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:
        if self._left >= 0 and len(launch.picks) > self._left:
            raise Interrupted
        self._left -= len(launch.picks)
        self.seen.append(launch.id)
        return super().run(launch, progress)


def test_every_pick_is_a_row(tmp_path: Path) -> None:
    summary = run(tmp_path)
    assert (summary.trials, summary.rounds_done, summary.ended) == (30, 3, "done")
    assert (summary.launches_run, summary.launches_skipped) == (6, 0)
    assert summary.rows_written == 3 * PICKS + INFEASIBLE
    assert summary.rows_by_status == {"ok": 3 * PICKS, "infeasible": INFEASIBLE}
    rows = store.read(tmp_path)
    assert rows.filter(pl.col("status") == "ok").group_by("run", "round").len().sort(
        "run"
    ).rows() == [(f"cycle-{number}", number, PICKS) for number in range(3)]
    lost = rows.filter(pl.col("status") == "infeasible")
    assert set(lost["reason"]) == {"NVLSTree has no LL for AllReduce", "AllGather has no NVLSTree"}


def test_each_round_is_a_part_of_its_own(tmp_path: Path) -> None:
    run(tmp_path)
    assert len(parts(tmp_path)) == 3
    assert all(pl.read_parquet(path)["run"].n_unique() == 1 for path in parts(tmp_path))


def test_rows_are_marked_as_simulated(tmp_path: Path) -> None:
    run(tmp_path)
    assert store.read(tmp_path)["source"].unique().to_list() == ["simulator"]


def test_default_requests_nothing_and_says_what_ran(tmp_path: Path) -> None:
    run(tmp_path)
    rows = store.read(tmp_path).filter("is_default")
    assert rows.height == 3 * 2 * 3 * 2
    assert rows.select(pl.all_horizontal(pl.col(REQUESTED_COLUMNS).is_null()).all()).item()
    assert rows["actual_algorithm"].null_count() == rows["actual_protocol"].null_count() == 0
    assert rows["verified"].all()


def test_noise_band_is_the_spread_of_default_pairs(tmp_path: Path) -> None:
    run(tmp_path)
    rows = store.read(tmp_path)
    assert rows["aa_noise_band"].null_count() == INFEASIBLE - 9 + 0
    key = ["round", "collective"]
    pairs = (
        rows.filter("is_default")
        .group_by([*key, "size_bytes"])
        .agg(spread=pl.col("time_us").max() / pl.col("time_us").min() - 1)
        .group_by(key)
        .agg(band=pl.col("spread").quantile(0.9))
    )
    joined = rows.join(pairs, on=key)
    assert joined.height == rows.height
    assert (joined["aa_noise_band"] - joined["band"]).abs().max() < 1e-12  # type: ignore[operator]


def test_sweep_that_is_there_is_not_run_again(tmp_path: Path) -> None:
    run(tmp_path)
    before = figures(tmp_path)
    with pytest.raises(UserError, match=r"was begun here; go on with --resume"):
        run(tmp_path)
    assert figures(tmp_path) == before


def test_resume_of_a_finished_sweep_does_nothing(tmp_path: Path) -> None:
    run(tmp_path)
    before = parts(tmp_path)
    summary = run(tmp_path, resume=True)
    assert (summary.launches_run, summary.rows_written) == (0, 0)
    assert summary.launches_skipped == 6 + 2
    assert parts(tmp_path) == before


@pytest.mark.parametrize("stop", [0, PICKS // 2, PICKS, 2 * PICKS, 3 * PICKS - 1])
def test_resume_gives_the_figures_of_an_uninterrupted_run(stop: int, tmp_path: Path) -> None:
    made = sweep()
    with pytest.raises(Interrupted):
        run(tmp_path / "broken", made, runner=StopsAfter(made, stop))
    run(tmp_path / "broken", resume=True)
    run(tmp_path / "whole")
    assert figures(tmp_path / "broken") == figures(tmp_path / "whole")


def test_round_that_was_begun_is_not_picked_again(tmp_path: Path) -> None:
    made = sweep()
    with pytest.raises(Interrupted):
        run(tmp_path, made, runner=StopsAfter(made, 0))
    strategy = Cycles(made.trials, 3)
    run_sweep(made, strategy, SimulatorRunner(made.file), tmp_path, resume=True)
    # Round 0 was written down; the later ones know all outcomes of those before.
    assert strategy.asked[3:] == [(1, 36), (2, 63), (3, 90)]


def test_more_cycles_are_added_to_those_that_are_there(tmp_path: Path) -> None:
    run(tmp_path)
    longer = sweep(TEXT.replace("cycles = 3", "cycles = 5"))
    assert run(tmp_path, longer, resume=True).launches_run == 4
    run(tmp_path / "whole", longer)
    assert figures(tmp_path) == figures(tmp_path / "whole")


def test_another_sweep_or_system_in_the_same_directory_is_not_in_the_way(tmp_path: Path) -> None:
    run(tmp_path)
    run(tmp_path, sweep(TEXT.replace('"grid"', '"other"')))
    run(tmp_path, sweep(TEXT.replace('"sim"', '"other"')))
    assert store.read(tmp_path).height == 3 * (3 * PICKS + INFEASIBLE)


def test_parts_without_a_journal_are_not_added_to(tmp_path: Path) -> None:
    run(tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "a" / "measurements").rename(tmp_path / "b" / "measurements")
    with pytest.raises(UserError, match="no journal says what they are"):
        run(tmp_path / "b")


def test_provenance_holds_the_sweep_and_the_runner(tmp_path: Path) -> None:
    run(tmp_path)
    record = store.provenance_of(tmp_path)[0]
    assert record["sweep_file"] == TEXT
    assert (record["tool"], record["runner"]) == ("run", "simulator")
    assert {"git_commit", "host", "python", "dynamiccl_version"} <= record.keys()


def test_sweep_that_the_runner_refuses_leaves_nothing(tmp_path: Path) -> None:
    made = sweep(TEXT.replace("num_nodes = 2", "num_nodes = 3"))
    with pytest.raises(InvalidSweep):
        run(tmp_path / "out", made)
    assert not (tmp_path / "out").exists()


def test_resume_with_other_trials_is_refused(tmp_path: Path) -> None:
    whole = sweep()
    run(tmp_path, Sweep(whole.file, whole.text, whole.trials[:2]))
    before = parts(tmp_path)
    with pytest.raises(UserError, match="other trials"):
        run(tmp_path, whole, resume=True)
    assert parts(tmp_path) == before


def test_sweep_of_a_release_with_other_launches_is_refused(tmp_path: Path) -> None:
    run(tmp_path)
    path = tmp_path / ".journal" / "system=sim" / "sweep=grid" / "sweep.json"
    grid = json.loads(path.read_text())
    del grid["layout"]
    path.write_text(json.dumps(grid))
    with pytest.raises(UserError, match="another release began"):
        run(tmp_path, resume=True)


class Watch:
    """Keeps what it is told, and says stop after so many outcomes."""

    def __init__(self, stop_after: int = 10**9) -> None:
        self.expected = self.advanced = 0
        self.outcomes: list[Outcome] = []
        self._stop_after = stop_after

    def expect(self, picks: int) -> None:
        self.expected = picks

    def advance(self, picks: int) -> None:
        self.advanced += picks

    def outcome(self, trial: Trial, outcome: Outcome) -> None:
        assert trial.key == outcome.trial_key
        self.outcomes.append(outcome)

    def stopping(self) -> bool:
        return len(self.outcomes) >= self._stop_after


def test_watcher_is_told_of_every_pick(tmp_path: Path) -> None:
    watch = Watch()
    run(tmp_path, watcher=watch)
    assert watch.expected == watch.advanced == len(watch.outcomes) == 3 * PICKS + INFEASIBLE
    assert sum(not outcome.ok for outcome in watch.outcomes) == INFEASIBLE


def test_asked_to_stop_it_finishes_the_launch_and_seals(tmp_path: Path) -> None:
    summary = run(tmp_path, watcher=Watch(stop_after=20))
    assert (summary.ended, summary.rounds_done) == ("interrupted", 0)
    assert len(parts(tmp_path)) == 1
    again = Watch()
    assert run(tmp_path, resume=True, watcher=again).ended == "done"
    assert again.advanced == 3 * PICKS + INFEASIBLE
    run(tmp_path / "whole")
    assert figures(tmp_path) == figures(tmp_path / "whole")


def test_shards_share_the_launches_and_together_are_the_sweep(tmp_path: Path) -> None:
    for index in range(2):
        run(tmp_path / "shards", shard=Shard(index, 2), resume=True)
    run(tmp_path / "whole")
    assert figures(tmp_path / "shards") == figures(tmp_path / "whole")


class Flaky:
    """A machine on which Ring/Simple hangs from 2 MiB on; what comes after it is not reached."""

    name = "flaky"

    def __init__(self, made: Sweep) -> None:
        self._file = made.file
        self.tried: Counter[str] = Counter()
        self.learnt: list[str] = []

    def check(self, trials: Sequence[Trial]) -> None:
        pass

    def launches(self, round_: Round) -> tuple[Launch, ...]:
        return SimulatorRunner(self._file).launches(round_)

    def run(self, launch: Launch, progress: Callable[[int], None]) -> LaunchResult:  # noqa: ARG002
        done: list[Measured] = []
        for place, pick in enumerate(launch.picks):
            self.tried[pick.trial.key] += 1
            row = pick_row(self._file, launch, pick) | dict(self.environment())
            if pick.trial.config.key == "Ring/Simple" and pick.trial.size_bytes >= 2 << 20:
                row |= {"status": "timed_out", "reason": "no new row", "statistic": "none"}
                done.append(Measured(pick, (row,)))
                bad = (Quarantined(pick.trial, "hung"),)
                return LaunchResult(tuple(done), launch.picks[place + 1 :], bad, {"at": place})
            done.append(Measured(pick, (row | {"time_us": 5.0},)))
        return LaunchResult(tuple(done))

    def measurements(self, launch: Launch) -> int:
        return len(launch.picks)

    def reason_to_skip(self, trial: Trial) -> str | None:  # noqa: ARG002
        return None

    def learn(self, launch: str, facts: Mapping[str, Any]) -> None:
        assert "at" in facts
        self.learnt.append(launch)

    def environment(self) -> Row:
        return {"source": Source.NCCL_TESTS_TEXT.value, "gpu": "H100"}


def test_hung_config_is_quarantined_from_its_size_on_and_the_rest_is_measured(
    tmp_path: Path,
) -> None:
    made = sweep(TEXT.replace('"AllReduce", "AllGather"', '"AllReduce"'))
    flaky = Flaky(made)
    summary = run(tmp_path, made, runner=flaky)
    rows = store.read(tmp_path)
    hung = rows.filter(pl.col("status") == "timed_out")
    assert set(hung["requested_protocol"]) == {"Simple"}
    assert hung["size_bytes"].min() == 2 << 20
    kept_out = rows.filter(pl.col("status") == "failed")
    assert set(kept_out["size_bytes"]) <= {2 << 20, 4 << 20}
    assert kept_out["reason"][0].startswith("not tried: Ring/Simple hung at ")
    # Nothing is a gap: all other picks have a time, in every round.
    times = rows.filter(pl.col("time_us").is_not_null())
    assert times.height == 3 * (15 - 2)
    assert summary.rows_by_status["ok"] == times.height
    assert hung.height + kept_out.height == 3 * 2
    assert len(flaky.learnt) == hung.height


def test_quarantine_and_facts_are_known_after_a_resume(tmp_path: Path) -> None:
    made = sweep(TEXT.replace('"AllReduce", "AllGather"', '"AllReduce"'))
    run(tmp_path, made, runner=Flaky(made), watcher=Watch(stop_after=14))
    again = Flaky(made)
    run(tmp_path, made, runner=again, resume=True)
    assert len(again.learnt) >= 1
    assert all(again.tried[f"AllReduce:2x8:{4 << 20}:Ring/Simple"] <= 1 for _ in range(1))
    rows = store.read(tmp_path)
    asked = Counter(rows.select("trial", "run", "repeat").rows())
    assert set(asked.values()) == {1}


def test_finished_sweep_leaves_the_table_that_follows_from_it(tmp_path: Path) -> None:
    quiet = "[simulator]\nnoise_sigma = 0.002\ntail_probability = 0\ndrift_sigma = 0\n"
    wide = TEXT.replace("num_nodes = 2", "num_nodes = 4").replace('max = "4M"', 'max = "16M"')
    made = sweep(
        wide.replace('["Ring", "NVLSTree"]', '["Ring", "Tree"]').replace('"LL", ', '"LL128", ')
        + quiet
    )
    run(tmp_path, made)
    table = pl.read_csv(tmp_path / "choices" / "system=sim" / "sweep=grid.csv")
    assert table.height == len({trial.task for trial in made.trials})
    reduce = dict(
        table.filter(pl.col("collective") == "AllReduce").select("size_bytes", "config").rows()
    )
    # The published factors make Tree/LL128 the best there, by some 40 % (the default is Ring).
    assert reduce[2 << 20] == "Tree/LL128"
    assert reduce[1 << 20] == "ABSTAIN" or reduce[1 << 20].startswith("Tree")


def test_interrupted_sweep_leaves_no_table(tmp_path: Path) -> None:
    run(tmp_path, watcher=Watch(stop_after=20))
    assert not (tmp_path / "choices").exists()
