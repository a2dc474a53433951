"""Worlds drawn at random: what is another in each draw, and what stays."""

import numpy as np
import polars as pl
import pytest

from dynamiccl.evaluate.worlds.kinds import WORLDS
from dynamiccl.evaluate.worlds.scores import paired, summary
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.drawn import FIELD_SIGMA
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.simulator.systems import find_system

NAMES = {"h100": "h100-ib", "b300": "b300-nvlink", "gb10": "gb10-roce", "a100": "a100-nvswitch"}


@pytest.mark.parametrize("kind", WORLDS)
def test_nccls_costs_and_decisions_stay_and_times_move(kind: str) -> None:
    nodes, ranks = WORLDS[kind].shapes[0]
    call = Call(Group(nodes, ranks), Collective.AllReduce, 1 << 22)
    shipped, drawn, again, other = (
        find_system(NAMES[kind]), *(WORLDS[kind].make(seed) for seed in (3, 3, 4))
    )  # fmt: skip
    assert np.array_equal(shipped.cost_table(call), drawn.cost_table(call))
    assert shipped.resolve(call, ABSTAIN) == drawn.resolve(call, ABSTAIN)
    times = [each.parts(call, ABSTAIN).quiet_us for each in (shipped, drawn, again, other)]
    assert times[1] == times[2]
    assert len(set(times)) == 3


def test_field_is_smooth_and_as_wide_as_it_says() -> None:
    group, config = Group(4, 8), Config(Algorithm.Ring, Protocol.Simple)
    base = find_system("h100-ib")
    off = []
    for seed in range(60):
        system = WORLDS["h100"].make(seed)
        here, near, far = (
            Call(group, Collective.AllReduce, size) for size in (1 << 20, 3 << 19, 1 << 29)
        )
        off.append(
            [
                np.log(system.parts(c, config).quiet_us / base.parts(c, config).quiet_us)
                for c in (here, near, far)
            ]
        )
    logs = np.array(off)
    assert logs.std(axis=0) == pytest.approx(FIELD_SIGMA, rel=0.35)
    assert np.corrcoef(logs[:, 0], logs[:, 1])[0, 1] > 0.95
    assert abs(np.corrcoef(logs[:, 0], logs[:, 2])[0, 1]) < 0.6


def rows(policy: str, regrets: list[float]) -> list[dict[str, object]]:
    return [
        {
            "policy": policy,
            "draw": draw,
            "regret": regret,
            "headroom": True,
            "worse": regret > 0.5,
            "gain": 1.0 - regret,
            "possible": 1.0,
        }
        for draw, regret in enumerate(regrets)
        for _ in range(4)
    ]


def test_figures_are_means_over_tasks_with_intervals_over_draws() -> None:
    found = summary(pl.DataFrame(rows("a", [0.0, 0.2, 0.4, 0.6])))
    assert found["mean_regret"] == found["headroom_regret"] == pytest.approx(0.3)
    assert found["share_worse"] == 0.25
    assert found["gain_kept"] == pytest.approx(0.7)
    assert found["mean_regret_lo"] < 0.15
    assert found["mean_regret_hi"] > 0.45


def test_pairs_are_of_one_draw() -> None:
    both = pl.DataFrame([*rows("a", [0.1, 0.3, 0.5]), *rows("b", [0.2, 0.4, 0.6])])
    found = paired(both, "a", "b")
    assert found["regret"] == pytest.approx(-0.1)
    assert found["regret_lo"] == pytest.approx(-0.1)
    assert found["head_hi"] == pytest.approx(-0.1)
