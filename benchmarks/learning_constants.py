"""NCCL's tuning constants fitted to each shape, against a table of the nearest measured size.

Two draws of the H100 worlds (learning_perturbed.py), whose truth is no function of NCCL's costs,
ten shapes each. Constants are fitted on the training sizes of one shape, and kept if they are
better than NCCL's own on the validation sizes; both are judged on the test sizes without noise,
and only configs that leave channels to NCCL count. *Gain*: mean ln of NCCL's own time less that of
the policy; what counts is the sum of gains over that of the tables. Intervals are bootstraps of
(draw, shape). The same constants on another shape of the same draw are the left-out figure.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
from learning_figures import parallel
from worlds import Draw

from dynamiccl.nccl import NcclVersion
from dynamiccl.simulator.default import CostModel, Factors, find_machine
from dynamiccl.simulator.group import Group
from dynamiccl.train.recalibrate.fit import Recalibration, Tasks, recalibrate

DRAWS: Final = 2
MODEL: Final = NcclVersion(2, 27, 5), "h100-ib"
#: (nodes, ranks a node) of the H100 worlds.
SHAPES: Final = tuple((nodes, ranks) for nodes in (2, 4, 8, 16, 32) for ranks in (4, 8))


def constants_figures(out: Path) -> dict[str, Any]:
    """The share of a table's gain, with its interval, and what leaving the shape costs."""
    rows: list[dict[str, float]] = []
    for _, found in parallel(_draw, [(out / str(draw), draw) for draw in range(DRAWS)]):
        rows += found
    own, fitted, table, left = (
        np.array([row[name] for row in rows]) for name in ("own", "constants", "table", "left_out")
    )
    random = np.random.default_rng(0)
    drawn = random.integers(len(rows), size=(2_000, len(rows)))
    ratios = (own - fitted)[drawn].sum(axis=1) / (own - table)[drawn].sum(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {
        "constants_gain_of_table": float((own - fitted).sum() / (own - table).sum()),
        "constants_gain_of_table_lo": float(low),
        "constants_gain_of_table_hi": float(high),
        "constants_own_loss": float(own.mean()),
        "constants_loss": float(fitted.mean()),
        "constants_table_loss": float(table.mean()),
        "constants_left_out_loss": float(left.mean()),
        "constants_kept": float(np.mean([row["helps"] for row in rows])),
        "constants_worse": float((fitted > own + 0.01).mean()),
    }


def _draw(folder: Path, number: int) -> list[dict[str, float]]:
    """All shapes of one draw."""
    draw = Draw.make("h100", number, folder)
    version, machine = MODEL
    model = CostModel(version, find_machine(machine))
    made = {
        shape: recalibrate(draw.data, draw.truth, model, Group(*shape), seed=number)
        for shape in SHAPES
    }
    rows = []
    for index, shape in enumerate(SHAPES):
        group = Group(*shape)
        tasks = Tasks.of(draw.truth, draw.data.catalogue, group, model)
        # Twice or half as many nodes of the same kind: the nearest shape there is.
        other = made[SHAPES[index + 2 if index + 2 < len(SHAPES) else index - 2]]
        factors = other.factors if other.helps else Factors()
        found = made[shape]
        rows.append(
            {
                "own": found.own,
                "constants": found.constants,
                "table": found.table,
                "helps": float(found.helps),
                "left_out": Recalibration(model, group).mean_loss(tasks, factors),
            }
        )
    return rows
