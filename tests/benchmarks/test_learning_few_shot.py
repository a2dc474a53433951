"""A new system, probe by probe."""

import numpy as np
import pytest
from learning_few_shot import LOOKS, play, probes_within
from learning_new_system import expected, judged, table_of
from learning_probing import Descent, Forest, coarse_to_fine

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.nccl import Collective


def test_a_table_is_judged_by_true_times() -> None:
    table = table_of("gb10", Collective.AllReduce)
    time = np.exp(table.log_time)
    nccl = judged(table, np.full(len(time), ABSTAIN_ACTION))
    assert nccl["regret"] == nccl["default_regret"] > 0.0
    assert nccl["share_worse"] == nccl["acts"] == 0.0
    best = judged(table, time.argmin(axis=1))
    assert best["regret"] == best["share_worse"] == 0.0
    worst = judged(table, np.where(table.is_open, time, -1.0).argmax(axis=1))
    assert worst["share_worse"] > 0.5


@pytest.mark.parametrize("way", ["expected improvement", "flat prior"])
def test_probes_help_and_without_any_nothing_is_changed(way: str) -> None:
    curve = play("gb10", int(Collective.AllReduce), 0, way)
    assert [look["probes"] for look in curve] == list(LOOKS)
    assert curve[0]["regret"] == curve[0]["default_regret"]
    assert curve[-1]["regret"] < 0.1 * curve[0]["regret"]
    assert curve[-1]["share_worse"] == 0.0


def test_a_prior_is_nothing_or_nccls_costs_or_what_other_systems_make_of_them() -> None:
    table = table_of("a100", Collective.AllReduce)
    kind = "a100", Collective.AllReduce
    assert not expected(*kind, "flat", ("b300",)).any()
    assert np.array_equal(expected(*kind, "costs", ("b300",)), table.log_cost)
    told = expected(*kind, "policy", ("b300",))
    # B300 is like A100: its residual takes off most of what the costs are wrong by.
    off = [np.abs(table.log_time - each).mean() for each in (table.log_cost, told)]
    assert off[1] < 0.5 * off[0]
    with pytest.raises(ValueError, match="no prior 'none'; choose from flat, costs, policy"):
        expected(*kind, "none", ())


def test_a_descent_ends_at_the_best_of_a_size_where_nothing_is_noisy() -> None:
    table = table_of("gb10", Collective.Broadcast)
    alone, carried = (Descent(table, carries=carries) for carries in (False, True))
    for way in (alone, carried):
        while (place := way.pick())[0] == len(table.own) - 1:
            asked = np.array([place, (place[0], ABSTAIN_ACTION)])
            way.tell(asked, table.log_time[tuple(asked.T)])
    assert alone.chosen()[-1] == table.log_time[-1].argmin() != ABSTAIN_ACTION
    assert not alone.chosen()[:-1].any()
    assert (carried.chosen() == alone.chosen()[-1]).all()
    assert coarse_to_fine(9)[:4] == [8, 0, 4, 2]


def test_a_forest_takes_the_least_that_its_trees_predict_and_probes_where_they_differ() -> None:
    table = table_of("gb10", Collective.Broadcast)
    forest = Forest(table, np.random.default_rng(0))
    assert not forest.chosen().any()
    places = np.argwhere(table.is_open)
    forest.tell(places, table.log_time[tuple(places.T)])
    # It was told everything.
    assert judged(table, forest.chosen())["regret"] < 0.02
    few = Forest(table, np.random.default_rng(0))
    few.tell(places[:40], table.log_time[tuple(places[:40].T)])
    # The first sizes are known, the last are not.
    assert few.pick()[0] > places[39][0]


def test_probes_are_counted_from_where_the_regret_stays_low() -> None:
    def curve(seed: int, low_from: int) -> list[dict[str, float]]:
        rest = {"default_regret": 1.0, "share_worse": 0.0, "acts": 0.0}
        return [
            {"probes": look, "seed": seed, "regret": 0.01 if look >= low_from else 0.5, **rest}
            for look in LOOKS
        ]

    rows = [*curve(0, 20), *curve(1, 60)]
    assert probes_within(rows, "n") == {"n": 60.0, "n_lo": 20.0, "n_hi": 60.0}
    never = probes_within([*curve(0, 20), *curve(1, 999)], "n")
    assert never == {"n": None, "n_lo": 20.0, "n_hi": None}
