"""NCCL's own constants, fitted: what they gain, and what a tuner is told to write."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.datasets.scoring import task_grid
from dynamiccl.datasets.splits import Split
from dynamiccl.errors import NotEnoughData
from dynamiccl.nccl import Algorithm, Collective, NcclVersion, Protocol
from dynamiccl.serve.constants import TuningConstants
from dynamiccl.simulator.default import CostModel, Factors, Overrides, find_machine
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.system import Call
from dynamiccl.train.data import TrainingData, load_data
from dynamiccl.train.recalibrate.factors import NUM_FACTORS, as_constants, as_factors
from dynamiccl.train.recalibrate.fit import Recalibration, Tasks, recalibrate
from tests.data_sets import SWEEP, make_data

GROUP = Group(4, 8)
#: 2.27.5 is what the simulated system runs; from 2.28 on a tuner may write constants.
MODEL = CostModel(NcclVersion(2, 27, 5), find_machine("h100-ib"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    text = SWEEP.replace('max = "1G"', 'max = "1G", steps_per_octave = 2')
    return make_data(tmp_path_factory.mktemp("constants"), text)


@pytest.fixture(scope="module")
def loaded(data: Path) -> TrainingData:
    return load_data(data, 0)


def test_nccls_own_constants_are_factors_of_one() -> None:
    own = as_factors(np.zeros(NUM_FACTORS))
    same = CostModel(MODEL.version, MODEL.machine, replace(Overrides(), factors=own))
    assert dict(same.lines(GROUP)) == dict(MODEL.lines(GROUP))


def test_predicted_costs_are_those_of_the_model(loaded: TrainingData) -> None:
    tasks = Tasks.of(loaded.validation, loaded.catalogue, GROUP, MODEL)
    assert len(tasks.calls) == len(loaded.validation.tasks)
    costs = Recalibration(MODEL, GROUP).costs_us(tasks, Factors())
    for row, call in enumerate(tasks.calls):
        table = MODEL.cost_table(call).reshape(-1)
        known = np.isfinite(costs[row])
        assert known.sum() == (table > 0).sum()
        assert costs[row][known] == pytest.approx(table[known], rel=1e-5)


def test_fitted_constants_gain_on_sizes_that_they_never_saw(loaded: TrainingData) -> None:
    test = task_grid(loaded.frame, loaded.catalogue, [Split.TEST])
    found = recalibrate(loaded, test, MODEL, GROUP, seed=0)
    assert found.tasks == test.tasks.height
    # Whatever was fitted, what is kept is no worse where it was chosen.
    nccl = Recalibration(MODEL, GROUP)
    validation = Tasks.of(loaded.validation, loaded.catalogue, GROUP, MODEL)
    better = nccl.mean_loss(validation, found.factors) < nccl.mean_loss(validation, Factors())
    assert found.helps == better
    train = Tasks.of(
        task_grid(loaded.frame, loaded.catalogue, [Split.TRAIN]), loaded.catalogue, GROUP, MODEL
    )
    assert nccl.mean_loss(train, found.factors) <= nccl.mean_loss(train, Factors())
    if not found.helps:
        assert found.constants == found.own


def test_a_lower_ring_constant_makes_nccl_take_the_ring() -> None:
    call = Call(GROUP, Collective.AllReduce, 1 << 20)
    cheap = {(Algorithm.Ring, protocol): 0.2 for protocol in Protocol}
    factors = Factors(base=cheap, hop=cheap)
    model = CostModel(MODEL.version, MODEL.machine, replace(Overrides(), factors=factors))
    before, after = (each.cost_table(call).reshape(-1) for each in (MODEL, model))
    ring = slice(3, 6)
    assert (after[ring] < before[ring]).all()
    others = [i for i in range(21) if not 3 <= i < 6]
    assert (after[others] == before[others]).all()


def test_constants_are_what_a_tuner_writes() -> None:
    comm = MODEL.communicator(GROUP)
    made = as_constants(as_factors(np.full(NUM_FACTORS, np.log(2.0))), comm)
    kept = TuningConstants.from_json(json.loads(json.dumps(made)), num_nodes=4, num_ranks=32)
    base = np.array(kept.to_json()["baseLatencies"], dtype=float)
    # Tree and Ring of 2.27: 6.8, 14, 8.4 and 6.6, 14, 8.4; the others stay NCCL's own.
    assert base[:2].tolist() == [[13.6, 28.0, 16.8], [13.2, 28.0, 16.8]]
    assert np.isnan(base[2:]).all()
    # LL's ceiling of more than two nodes beside an Intel CPU; the rings' of LL128 on Hopper.
    assert made["llMaxBws"][0][2] == pytest.approx(40.8)
    assert made["perChMaxRingLL128Bws"][2][2] == pytest.approx(73.4)
    assert sum(each is not None for row in made["perChMaxTreeBws"] for each in row) == 1


def test_a_shape_that_was_not_measured_is_refused(loaded: TrainingData) -> None:
    test = task_grid(loaded.frame, loaded.catalogue, [Split.TEST])
    with pytest.raises(NotEnoughData, match="no train task of 2x8"):
        recalibrate(loaded, test, MODEL, Group(2, 8), seed=0)
