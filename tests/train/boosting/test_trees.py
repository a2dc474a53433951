"""Trees as tensors answer what scikit-learn answers."""

import numpy as np
import pytest
import torch
from sklearn.ensemble import HistGradientBoostingRegressor

from dynamiccl.train.boosting.trees import Trees
from dynamiccl.train.torch_files import script


@pytest.mark.parametrize("leaves", [2, 15, 63])
def test_scripted_trees_predict_what_scikit_learn_predicts(leaves: int) -> None:
    random = np.random.default_rng(leaves)
    rows, asked = random.normal(size=(2, 500, 6))
    # Whole numbers, as one-hot features are: rows that lie on a threshold.
    rows[:, 3:], asked[:, 3:] = np.rint(rows[:, 3:]), np.rint(asked[:, 3:])
    y = np.sin(3.0 * rows[:, 0]) + rows[:, 1] * rows[:, 3]
    fitted = HistGradientBoostingRegressor(
        max_iter=40, max_leaf_nodes=leaves, min_samples_leaf=2, early_stopping=False
    ).fit(rows, y)
    trees = script(Trees(fitted))
    for each in (rows, asked):
        found = trees(torch.from_numpy(each)).numpy()
        assert np.abs(found - fitted.predict(each)).max() < 1e-6
    assert np.corrcoef(trees(torch.from_numpy(rows)).numpy(), y)[0, 1] > 0.5


def test_trees_of_a_single_leaf_are_a_constant() -> None:
    rows = np.ones((30, 2))
    fitted = HistGradientBoostingRegressor(max_iter=3, early_stopping=False).fit(rows, rows[:, 0])
    found = Trees(fitted)(torch.zeros(4, 2, dtype=torch.float64))
    assert found.tolist() == pytest.approx([1.0] * 4)
