"""A new system, probe by probe."""

import numpy as np
from learning_few_shot import LOOKS, play, probes_within
from learning_new_system import judged, table_of

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


def test_probes_help_and_without_any_nothing_is_changed() -> None:
    curve = play("gb10", int(Collective.AllReduce), 0, "expected improvement")
    assert [look["probes"] for look in curve] == list(LOOKS)
    assert curve[0]["regret"] == curve[0]["default_regret"]
    assert curve[-1]["regret"] < 0.1 * curve[0]["regret"]
    assert curve[-1]["share_worse"] == 0.0


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
