"""scikit-learn's boosted trees as tensors, evaluated in TorchScript.

N rows, R numbers of a row, T trees, K nodes of a tree (leaves included; padded), B batch, A actions
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn


class Trees(nn.Module):
    """(rows_NR float64) -> (N,) sum of the trees; scriptable.

    All trees go down together, as many steps as the deepest has: a leaf is its own child.
    """

    feature: torch.Tensor
    threshold: torch.Tensor
    below: torch.Tensor
    roots: torch.Tensor
    value: torch.Tensor

    def __init__(self, fitted: Any) -> None:
        """Convert a fitted `HistGradientBoostingRegressor` without categorical features."""
        super().__init__()
        trees = [predictor.nodes for (predictor,) in fitted._predictors]
        most = max(len(tree) for tree in trees)
        feature, left, right = (np.zeros((len(trees), most), dtype=np.int64) for _ in range(3))
        threshold, value = (np.zeros((len(trees), most)) for _ in range(2))
        for index, tree in enumerate(trees):
            start = index * most
            is_leaf, own = tree["is_leaf"].astype(bool), start + np.arange(len(tree))
            feature[index, : len(tree)] = np.where(is_leaf, 0, tree["feature_idx"])
            threshold[index, : len(tree)] = np.where(is_leaf, 0.0, tree["num_threshold"])
            value[index, : len(tree)] = tree["value"]
            left[index, : len(tree)] = np.where(is_leaf, own, start + tree["left"])
            right[index, : len(tree)] = np.where(is_leaf, own, start + tree["right"])
        self.baseline = float(fitted._baseline_prediction.item())
        self.depth = int(max(tree["depth"].max() for tree in trees))
        self.register_buffer("feature", torch.from_numpy(feature.ravel()))
        self.register_buffer("threshold", torch.from_numpy(threshold.ravel()))
        # (T x K, 2), numbered through all trees: where to go above the threshold, and else.
        below = np.stack([right.ravel(), left.ravel()], axis=1)
        self.register_buffer("below", torch.from_numpy(below.ravel()))
        self.register_buffer("value", torch.from_numpy(value.ravel()))
        self.register_buffer("roots", torch.arange(len(trees)) * most)

    def forward(self, rows_NR: torch.Tensor) -> torch.Tensor:
        """(N,) sums of leaf values."""
        node_NT = self.roots.unsqueeze(0).expand(rows_NR.size(0), -1)
        for _ in range(self.depth):
            number_NT = rows_NR.gather(1, self.feature[node_NT])
            goes_left_NT = (number_NT <= self.threshold[node_NT]).to(torch.int64)
            node_NT = self.below[2 * node_NT + goes_left_NT]
        return self.value[node_NT].sum(dim=1) + self.baseline


class Boosted(nn.Module):
    """(numbers_BAR, cells_BA) -> means (B, A) of y, spreads (B, A) of gains; scriptable.

    A gain is as unsure as gains like it were off on sizes held out, and as trees that have seen
    less differ about it.
    """

    def __init__(self, mean: Trees, of_parts: Sequence[Trees], log_off: Trees | None) -> None:
        """Take the trees of y, of y from parts of the rows, and of ln of how far gains were off.

        Without the last nothing is known of how sure any gain is, and spreads are infinite.
        """
        super().__init__()
        self.mean = mean
        self.of_parts = nn.ModuleList(of_parts)
        self.log_off = log_off

    def forward(
        self, numbers_BAR: torch.Tensor, cells_BA: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Means, and spreads of what each action is off action 0's."""
        rows_NR = numbers_BAR.flatten(0, 1)
        means_BA = self.mean(rows_NR).view(cells_BA.size())
        gains_BA = means_BA - means_BA[:, :1]
        squares_BA = torch.full_like(means_BA, float("inf"))
        if self.log_off is not None:
            squares_BA = torch.exp(2.0 * self.log_off(rows_NR)).view(cells_BA.size())
            for part in self.of_parts:
                found_BA = part(rows_NR).view(cells_BA.size())
                apart_BA = found_BA - found_BA[:, :1] - gains_BA
                squares_BA = squares_BA + torch.square(apart_BA) / len(self.of_parts)
        # Of NCCL's own choice there is nothing to be unsure of.
        own_B1 = torch.zeros_like(squares_BA[:, :1])
        return means_BA, torch.cat([own_B1, torch.sqrt(squares_BA[:, 1:])], dim=1)
