"""Whole jobs in the simulated world: who plays, in what order they come out, and the page."""

import html
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.evaluate.simulate.compare import (
    Comparison,
    Estimate,
    Row,
    conclude,
    over_best,
    play,
    verdicts,
)
from dynamiccl.evaluate.simulate.lineup import (
    DELAYED,
    NCCL,
    ORACLE,
    ORACLES,
    QUIET_TABLE,
    SEARCH,
    Setting,
    policy_contenders,
    simple_contenders,
)
from dynamiccl.evaluate.simulate.players import best_fixed, best_table
from dynamiccl.evaluate.simulate.rollout import roll_out
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.scenario import MarkovLink, Scenario
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.trigger.detector import Detector
from dynamiccl.train.trigger.module import TriggerModule
from tests.cli.conftest import Shell
from tests.policies import hand_made_manifest
from tests.rows import default, forced, frame

#: Congestion that moves what is best, and little noise.
AROUND = Scenario(
    meaning="for a test",
    link=(
        MarkovLink(
            on="inter",
            kind="markov",
            slowdowns=(1.0, 8.0),
            dwell_us=(100_000.0, 100_000.0),
            following=((0.0, 1.0), (1.0, 0.0)),
        ),
    ),
    first_use_us=0.0,
    switch_us=2.0,
)


def setting(calls: int = 600, scenario: Scenario = AROUND) -> Setting:
    workload = make_workload(["decode"], Group(4, 8))
    return Setting(find_system("h100-ib"), workload, scenario, calls=calls, jobs=2)


@pytest.fixture(scope="module")
def compared() -> Comparison:
    each = setting()
    return conclude(each, play(each, simple_contenders(each), range(3)))


def test_the_oracle_comes_first_and_no_table_beats_the_best_one(compared: Comparison) -> None:
    seconds = {row.name: row.seconds.mean for row in compared.rows}
    assert seconds[ORACLE] == min(seconds.values())
    tables = [seconds[n] for n in (NCCL, "best fixed config", "best quiet table")]
    assert seconds["best table of all states"] <= min(tables) * 1.005
    # Knowing the state is worth less when ranks have to agree first.
    assert seconds[ORACLE] < seconds[DELAYED]
    # There is something to gain from knowing the state, or this world would test nothing.
    assert seconds[ORACLE] < 0.99 * seconds["best table of all states"]


def test_nccl_is_what_rows_are_compared_with(compared: Comparison) -> None:
    rows = {row.name: row for row in compared.rows}
    assert rows[NCCL].over_default == Estimate(0.0, 0.0, 0.0)
    assert rows[NCCL].changes_per_1000_calls == 0.0
    assert rows[NCCL].share_slower_than_default == 0.0
    best = rows["best table of all states"]
    pairs = zip(best.seed_seconds, rows[NCCL].seed_seconds, strict=True)
    assert best.over_default.mean == pytest.approx(np.mean([a / b - 1 for a, b in pairs]))


def test_regret_counts_changes_and_is_never_below_zero(compared: Comparison) -> None:
    for row in compared.rows:
        assert row.regret.mean >= 0.0
        assert (row.regret.low or 0.0) <= row.regret.mean <= (row.regret.high or 0.0)


def test_equal_seeds_give_equal_totals(compared: Comparison) -> None:
    each = setting()
    rows = simple_contenders(each)
    again = conclude(each, play(each, [rows[-1], rows[0]], [0]))
    oracle = {row.name: row for row in compared.rows}[ORACLE]
    assert again.rows[0].seed_seconds[0] == oracle.seed_seconds[0]


def test_searches_try_configs_and_settle(compared: Comparison) -> None:
    changes = {row.name: row.changes_per_1000_calls for row in compared.rows}
    assert changes["AutoCCL search"] > 5.0
    each = setting(calls=3_000, scenario=AROUND.model_copy(update={"link": ()}))
    [search] = [c for c in simple_contenders(each) if c.name == "AutoCCL search"]
    env, player = search.prepare(each, 0)
    _, line = roll_out(env, player, seed=0)
    assert line.changed[:1_000].sum() > 10
    assert line.changed[-500:].sum() == 0


def test_a_table_begins_at_the_first_call_and_a_search_waits_for_agreement() -> None:
    each = setting()
    waits = {
        contender.name: contender.prepare(each, 0)[0].course.delay_calls
        for contender in simple_contenders(each)
    }
    assert waits[NCCL] == waits[ORACLE] == 0
    assert waits["AutoCCL search"] == waits[DELAYED] > 10


def test_the_best_fixed_config_falls_back_to_nccl_where_it_is_lacking() -> None:
    world = simple_contenders(setting())[0].world
    times = np.where(world.mask, 100.0, np.nan)
    favoured = int(np.flatnonzero(world.mask.all(axis=0))[-1])
    times[:, favoured] = 10.0
    assert set(best_fixed(world, times)) == {favoured}
    assert (best_table(times) == favoured).all()


def told_row(name: str, over: tuple[float, ...], share: float = 0.0) -> Row:
    """A row of two seeds whose time over NCCL's is `over`."""
    seconds = tuple(10.0 * (1.0 + each) for each in over)
    return Row(
        name=name,
        seconds=Estimate.of(seconds, least=0.0),
        over_default=Estimate.of(over),
        job_over_default=Estimate.of(over),
        regret=Estimate.of([0.0, 0.0]),
        changes_per_1000_calls=0.0,
        share_slower_than_default=share,
        alarms_per_1e5_calls=0.0,
        seed_seconds=seconds,
    )


DEFAULT_ROW = told_row(NCCL, (0.0, 0.0))


def test_the_first_line_says_who_gains_how_much() -> None:
    rows = [DEFAULT_ROW, told_row("mine", (-0.10, -0.11)), told_row(ORACLE, (-0.2, -0.2))]
    assert verdicts(rows)[0] == (
        "mine takes 10.5% less communication time than NCCL's own choice (95 % interval 4.1% to "
        "16.9%)."
    )
    rows = [DEFAULT_ROW, told_row(SEARCH, (-0.10, -0.11)), told_row(QUIET_TABLE, (0.0, 0.01))]
    assert verdicts(rows)[0].startswith(f"{SEARCH} takes 10.5% less")


def test_the_first_line_says_that_there_is_nothing_to_gain() -> None:
    rows = [DEFAULT_ROW, told_row("mine", (0.0, 0.0)), told_row(ORACLE, (0.001, 0.001))]
    first, ours = verdicts(rows)
    assert first.startswith("There is nothing to gain over NCCL's own choice here: the oracle")
    assert ours == "mine cannot be told from NCCL's own choice (+0.0% to +0.0%)."
    wide = [DEFAULT_ROW, told_row(ORACLE, (-0.1, 0.1))]
    assert verdicts(wide)[0].startswith("No gain over NCCL's own choice is shown")
    known = [DEFAULT_ROW, told_row(ORACLE, (-0.1, -0.1))]
    (told,) = verdicts(known)
    assert "though the oracle, which knows the network's state, takes 10.0% less" in told


def test_who_is_slower_is_told_once_with_the_share_of_calls() -> None:
    rows = [DEFAULT_ROW, told_row(SEARCH, (0.2, 0.21), share=0.97), told_row(ORACLE, (0.0, 0.0))]
    lines = verdicts(rows)
    assert f"{SEARCH} takes 20.5% MORE communication time" in lines[1]
    assert lines[2] == f"{SEARCH} is slower than NCCL's own choice in 97% of calls."
    assert not any(line.startswith(ORACLE) for line in lines)


def test_no_interval_of_seconds_or_regrets_is_negative() -> None:
    assert Estimate.of([1.0, 9.0]).low is not None
    assert (Estimate.of([1.0, 9.0]).low or 0.0) < 0.0
    spread = told_row("spread", (-0.9, 3.0))
    assert spread.seconds.low == 0.0
    assert "-" not in spread.seconds.text(".1f")


def test_rows_are_compared_with_the_best_seed_by_seed(compared: Comparison) -> None:
    best, more = over_best(compared.rows)
    spent = {row.name: row.seed_seconds for row in compared.rows}
    assert set(more) == set(spent) - {best, *ORACLES}
    for name, ratio in more.items():
        ratios = [a / b - 1 for a, b in zip(spent[name], spent[best], strict=True)]
        assert ratio == Estimate.of(ratios)
        assert np.mean(spent[name]) >= np.mean(spent[best])
    assert all(row.seconds.low is not None and row.seconds.low >= 0.0 for row in compared.rows)
    assert all(row.regret.low is not None and row.regret.low >= 0.0 for row in compared.rows)


def test_the_command_writes_a_page_with_the_jobs_course(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "page"
    done = shell(
        *("dynamiccl-evaluate", "simulate", "--out", out, "--workload", "decode"),
        *("--calls", 300, "--jobs", 1, "--seeds", 2, "--json"),
    )
    found = done.json
    assert found["rows"][0]["name"] == NCCL
    assert json.loads((out / "simulate.json").read_text()) == found
    page = (out / "simulate.html").read_text()
    for row in found["rows"]:
        assert row["name"].replace("'", "&#39;") in page
    assert page.count("<svg") == 1
    assert f"<h1>{found['verdicts'][0]}</h1>" in html.unescape(page)
    assert "over the oracle" not in page


def test_an_unknown_scenario_is_refused_before_anything_is_played(
    shell: Shell, tmp_path: Path
) -> None:
    done = shell("dynamiccl-evaluate", "simulate", "--out", tmp_path / "o", "--scenario", "rain")
    assert done.code == 2
    assert "congested" in done.err
    assert not (tmp_path / "o").exists()


def few_configs() -> Manifest:
    """A policy that knows three configs, trained on a system that is not simulated here."""
    rows = frame(
        *(default(size_bytes=1 << k) for k in (20, 22)),
        *(forced(a, "LL128", size_bytes=1 << k) for a in ("Ring", "Tree") for k in (20, 22)),
    )
    return hand_made_manifest(rows, frame().select("system", "collective", noise_band="time_us"))


class Counted(torch.nn.Module):
    """Takes the action of the highest number that is allowed, and counts what it was asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked = 0

    def forward(
        self, window: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        assert len(context) == len(window)
        self.asked += len(window)
        q = mask * -torch.arange(mask.shape[1], 0, -1) + (mask - 1.0) * 1e6
        return q.argmax(dim=1), q


def test_a_policy_plays_in_its_own_catalogue_and_is_asked_when_its_last_word_is_in_force() -> None:
    each, module = setting(calls=500), Counted()
    [contender] = policy_contenders(each, "mine", TorchPolicy(module, few_configs()), None)
    assert [config.key for config in contender.world.configs] == [
        "ABSTAIN",
        "Tree/LL128",
        "Ring/LL128",
    ]
    env, player = contender.prepare(each, 0)
    _, line = roll_out(env, player, seed=0)
    delay = env.course.delay_calls
    assert delay > 10
    # NCCL's own choice until the ranks agree, and then what the policy wants: Ring.
    assert (line.action[:delay] == 0).all()
    assert (line.action[-100:] == 2).all()
    asks = 500 / delay * len(env.world.keys) * each.jobs
    assert 0.2 * asks < module.asked <= asks + len(env.world.keys) * each.jobs


def test_with_a_trigger_levels_are_seen_and_a_search_begins_from_the_policy() -> None:
    each = setting(calls=1_500)
    trigger = TriggerModule(0.05).eval()
    policy = TorchPolicy(Counted(), few_configs())
    rows = policy_contenders(each, "mine", policy, lambda: Detector(trigger))
    assert [row.name for row in rows] == ["mine + Trigger", "search from mine + Trigger"]
    for row in rows:
        env, player = row.prepare(each, 1)
        totals, line = roll_out(env, player, seed=1)
        # Sudden congestion by eight, and next to no noise: it is found, and not without cause.
        assert totals.alarms.sum() > 0
        assert line.level.max() > 0.5
        assert (line.slowdown[np.flatnonzero(line.alarm_began)] > 1.0).mean() > 0.5
