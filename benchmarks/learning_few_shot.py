"""Probes that a new system needs for a good table: a Gaussian process against other methods.

Each of three systems is left out in turn; the kernel is fitted to whole tables of the other two,
and of the new one nothing is known but NCCL's own costs. A table is a (shape, collective) at
half-octave sizes from 1 KiB to 1 GiB (learning_new_system.py). A probe is one noisy time (sd 2 %)
of one config at one size; NCCL's own choice at that size is probed as often, and counts as a probe.
Several methods (learning_probing.py) choose what to probe and which config to use; each is judged
by true times at all sizes.
"""

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import torch
from learning_figures import parallel, student
from learning_new_system import NOISE, SYSTEMS, judged, table_of
from learning_probing import WAYS, make_way
from worlds import FIVE

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.nccl import Collective

#: Numbers of probes after which the table is judged.
LOOKS: Final = (0, 5, 10, 20, 40, 60, 80, 120, 160, 200)
WITHIN: Final = 0.02
SEEDS: Final = 3
CURVES: Final = ("regret", "default_regret", "share_worse", "acts")


def play(kind: str, collective: int, seed: int, way: str) -> list[dict[str, Any]]:
    """Probe one table by the method `way`; returns a row of scores for each of LOOKS."""
    torch.set_num_threads(1)
    table = table_of(kind, Collective(collective))
    random = np.random.default_rng((seed, collective))
    player = make_way(way, table, kind, Collective(collective), random)
    times_probed = np.zeros(table.log_cost.shape, dtype=np.int64)
    found: list[dict[str, Any]] = []
    probes = 0
    while True:
        if probes >= LOOKS[len(found)]:
            found.append(judged(table, player.chosen()) | {"probes": LOOKS[len(found)]})
            if len(found) == len(LOOKS):
                return [{**each, "kind": kind, "way": way, "seed": seed} for each in found]
        size, config = player.pick()
        asked = [[size, config]]
        # A gain is no surer than the time that it is compared with.
        owed = times_probed[size, ABSTAIN_ACTION] <= times_probed[size, config]
        if owed and config != ABSTAIN_ACTION:
            asked.append([size, ABSTAIN_ACTION])
        for each in asked:
            times_probed[tuple(each)] += 1
        places = np.array(asked)
        noise = NOISE * random.standard_normal(len(places))
        player.tell(places, table.log_time[tuple(places.T)] + noise)
        probes += len(asked)


def few_shot_figures(seeds: int = SEEDS) -> dict[str, Any]:
    """Curves by system and way, and after how many probes the mean is within 2 % for good."""
    jobs = [
        (kind, int(Collective.parse(collective)), seed, way)
        for seed in range(seeds)
        for kind in SYSTEMS
        for collective in FIVE
        for way in WAYS
    ]
    rows: list[dict[str, Any]] = []
    for _, found in parallel(play, jobs):
        rows += found
    figures: dict[str, Any] = {"few_shot": {}, "few_shot_probes": {}}
    for kind in SYSTEMS:
        for way in WAYS:
            mine = [r for r in rows if r["kind"] == kind and r["way"] == way]
            name = f"{kind}, {way}"
            figures["few_shot"][name] = {look: means(mine, look) for look in LOOKS}
            figures["few_shot_probes"][name] = probes_within(mine, "probes")
        ours = figures["few_shot_probes"][f"{kind}, {WAYS[0]}"]
        figures |= {key.replace("probes", f"probes_to_2pct_{kind}"): ours[key] for key in ours}
    worse = [r for r in rows if r["way"] == WAYS[0] and r["probes"] >= 20]
    by_seed = [
        float(np.mean([r["share_worse"] for r in worse if r["seed"] == seed]))
        for seed in range(seeds)
    ]
    return figures | student(by_seed, "few_shot_share_worse")


def means(rows: Sequence[dict[str, Any]], look: int) -> dict[str, float]:
    """Means over tables and seeds after so many probes."""
    now = [row for row in rows if row["probes"] == look]
    return {name: float(np.mean([row[name] for row in now])) for name in CURVES}


def probes_within(rows: Sequence[dict[str, Any]], name: str) -> dict[str, float | None]:
    """Probes from which on the mean regret stays within 2 %; None where that takes more than 200.

    `_lo` and `_hi` are the least and the most of the seeds, each by its own mean: a count that is
    capped has no Student's interval.
    """

    def after(mine: Sequence[dict[str, Any]]) -> float | None:
        late = [look for look in LOOKS if means(mine, look)["regret"] > WITHIN]
        left = [look for look in LOOKS if not late or look > max(late)]
        return float(left[0]) if left else None

    seeds = sorted({row["seed"] for row in rows})
    each = [after([row for row in rows if row["seed"] == seed]) for seed in seeds]
    known = [probes for probes in each if probes is not None]
    return {
        name: after(rows),
        f"{name}_lo": min(known, default=None),
        f"{name}_hi": max(known) if len(known) == len(each) else None,
    }
