"""Whole jobs in the simulated world: who plays, in what order they come out, and the page."""

import html
import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.evaluate import simulate
from dynamiccl.simulator.scenario import MarkovLink, Scenario
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import make_workload
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.trigger import Detector, TriggerModule
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


def setting(calls: int = 600, scenario: Scenario = AROUND) -> simulate.Setting:
    workload = make_workload(["decode"], Group(4, 8))
    return simulate.Setting(find_system("h100-ib"), workload, scenario, calls=calls, jobs=2)


@pytest.fixture(scope="module")
def compared() -> simulate.Comparison:
    each = setting()
    return simulate.conclude(
        each, simulate.play(each, simulate.simple_contenders(each), range(3)), frozenset()
    )


def test_the_oracle_comes_first_and_no_table_beats_the_best_one(
    compared: simulate.Comparison,
) -> None:
    rows = {row["name"]: row for row in compared["rows"]}
    seconds = {name: row["seconds"].mean for name, row in rows.items()}
    assert seconds[simulate.ORACLE] == min(seconds.values())
    best = "best table of all states"
    tables = [seconds[n] for n in (simulate.NCCL, "best fixed config", "best quiet table")]
    assert seconds[best] <= min(tables) * 1.005
    # Knowing the state is worth less when ranks have to agree first.
    assert seconds[simulate.ORACLE] < seconds[simulate.DELAYED]
    # There is something to gain from knowing the state, or this world would test nothing.
    assert seconds[simulate.ORACLE] < 0.99 * seconds[best]
    assert rows[simulate.NCCL]["over_default"] == simulate.Estimate(0.0, 0.0, 0.0)
    assert rows[simulate.NCCL]["changes_per_1000_calls"] == 0.0
    assert rows[simulate.NCCL]["share_slower_than_default"] == 0.0
    pairs = zip(rows[best]["seed_seconds"], rows[simulate.NCCL]["seed_seconds"], strict=True)
    assert rows[best]["over_default"].mean == pytest.approx(np.mean([a / b - 1 for a, b in pairs]))
    # No time is below 0, however few seeds there are.
    assert told_row("spread", -0.9, 3.0)["seconds"].low == 0.0


def test_equal_seeds_are_equal_and_only_late_deciders_wait(compared: simulate.Comparison) -> None:
    each = setting()
    rows = simulate.simple_contenders(each)
    again = simulate.conclude(each, simulate.play(each, [rows[-1], rows[0]], [0]), frozenset())
    oracle = {row["name"]: row for row in compared["rows"]}[simulate.ORACLE]
    assert again["rows"][0]["seed_seconds"][0] == oracle["seed_seconds"][0]
    waits = {row.name: row.prepare(each)[0].delay for row in rows}
    assert waits[simulate.NCCL] == waits[simulate.ORACLE] == 0
    assert waits[simulate.SEARCH] == waits[simulate.DELAYED] > 10


def told_row(name: str, *over: float) -> simulate.Row:
    """What verdicts are about of a row, with a seed for each of its times `over` NCCL's."""
    seconds = tuple(10.0 * (1.0 + each) for each in over)
    return {
        "name": name,
        "seconds": simulate.Estimate.of(seconds, least=0.0),
        "over_default": simulate.Estimate.of(over),
    }


OWN = "NCCL's own choice"
TIME = f"communication time than {OWN}"
GAINS = f"takes 11 % less {TIME} (95 % interval 4.1 % to 17 %)"
KNOWN = "the oracle, which knows the network's state,"
MORE = f"takes 0.1 % MORE {TIME} (95 % interval 0.1 % to 0.1 %)"
OPEN = f"cannot be told from {OWN} (between 127 % less and 127 % more time)"


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (
            [("mine", -0.10, -0.11), (simulate.SEARCH, 0.2, 0.21), (simulate.ORACLE, -0.2, -0.2)],
            [f"mine {GAINS}."],
        ),
        (
            [("mine", 0.0, 0.0), (simulate.ORACLE, 0.001, 0.001)],
            [
                f"There is nothing to gain over {OWN} here: {KNOWN} {MORE}.",
                f"mine takes exactly as long as {OWN}.",
            ],
        ),
        (
            [(simulate.ORACLE, -0.1, 0.1)],
            [f"No gain over {OWN} is shown: {KNOWN} {OPEN}; more --seeds narrow this."],
        ),
    ],
)
def test_the_first_sentence_says_who_gains_how_much(rows: Any, said: list[str]) -> None:
    made = [
        told_row(simulate.NCCL, *[0.0] * (len(rows[0]) - 1)),
        *(told_row(*each) for each in rows),
    ]
    assert simulate.verdicts(made, frozenset({"mine"})) == said


def test_the_command_writes_a_page_with_the_jobs_course(shell: Shell, tmp_path: Path) -> None:
    out = tmp_path / "page"
    command = (
        *("dynamiccl-evaluate", "simulate", "--out", out, "--workload", "decode"),
        *("--calls", 200, "--seeds", 2),
    )
    found = shell(*command, "--json").json
    assert found["rows"][0]["name"] == simulate.NCCL
    assert json.loads((out / "simulate.json").read_text()) == found
    page = (out / "simulate.html").read_text()
    assert page.count("<svg") == 1
    assert f"<h1>{found['verdicts'][0]}</h1>" in html.unescape(page)
    told = shell(*command).out.splitlines()
    assert told[0] == found["verdicts"][0]
    assert max(map(len, told[3:-1])) <= 100
    for row in found["rows"]:
        (line,) = [line for line in told if line.startswith(f"{row['name']}  ")]
        assert f"{row['seconds']['mean']:.2f}" in line


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
    [contender] = simulate.policy_contenders(each, "mine", TorchPolicy(module, few_configs()), None)
    assert [config.key for config in contender.world.configs] == [
        "ABSTAIN",
        "Tree/LL128",
        "Ring/LL128",
    ]
    env, player = contender.prepare(each)
    course = simulate.roll_out(env, player, each.calls, seed=0).course
    assert course is not None
    delay = env.delay
    assert delay > 10
    # NCCL's own choice until the ranks agree, and then what the policy wants: Ring.
    assert set(course["action"][:delay]) == {0}
    assert set(course["action"][-100:]) == {2}
    asks = 500 / delay * len(env.world.keys) * each.jobs
    assert 0.2 * asks < module.asked <= asks + len(env.world.keys) * each.jobs


def test_with_a_trigger_levels_are_seen_and_a_search_begins_from_the_policy() -> None:
    each = setting(calls=600)
    trigger = TriggerModule(0.05).eval()
    policy = TorchPolicy(Counted(), few_configs())
    rows = simulate.policy_contenders(each, "mine", policy, lambda: Detector(trigger))
    assert [row.name for row in rows] == ["mine + Trigger", "search from mine + Trigger"]
    for row in rows:
        env, player = row.prepare(each)
        totals = simulate.roll_out(env, player, each.calls, seed=1)
        course = totals.course
        assert course is not None
        # Sudden congestion by eight, and next to no noise: it is found, and not without cause.
        assert totals.alarms.sum() > 0
        assert course.filter(pl.col("level") > 0.5).height > 0
        assert np.mean(course.filter("alarm")["slowdown"].to_numpy() > 1.0) > 0.5
