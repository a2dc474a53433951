"""Baselines that are as careful as a policy."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from learning_cautious import Cautious

from dynamiccl.datasets.scoring import TaskGrid
from dynamiccl.evaluate.baselines.tables import Interpolated, NearestNeighbours
from dynamiccl.sizes import size_bin
from tests.evaluate.test_baselines import BETWEEN, SIZES, law


@pytest.mark.parametrize("make", [Interpolated, NearestNeighbours])
def test_a_cautious_baseline_acts_where_its_gain_is_beyond_what_misled_it(
    make: Callable[[TaskGrid], Any],
) -> None:
    training, validation = (with_bins(law(sizes)) for sizes in (SIZES, BETWEEN))
    bare = make(training).choose(validation)
    # Nothing misled it: it goes on as before.
    assert Cautious(make, training, validation, 0.05).choose(validation).tolist() == bare.tolist()
    # Where the default was faster all along, no gain is large enough.
    misled = replace(validation, times_us=validation.times_us * [0.01, 1.0, 1.0, 1.0])
    assert not Cautious(make, training, misled, 0.05).choose(validation).any()
    # 20 validation tasks and 21 training tasks are too few for one in a thousand.
    assert not Cautious(make, training, validation, 0.001).choose(validation).any()


def with_bins(made: TaskGrid) -> TaskGrid:
    bins = [size_bin(size) for size in made.tasks["size_bytes"]]
    return replace(made, tasks=made.tasks.with_columns(bin=pl.Series(bins)))
