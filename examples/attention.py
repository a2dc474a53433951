"""A recipe of your own in one file: a dueling double DQN whose window is read by attention.

docs/add-recipe.md explains it. Take a copy, change it, train it:

    dynamiccl-train fit --data data --recipe attention.py --set steps=2000
"""

import torch
from torch import nn

from dynamiccl.train.networks import register_window_encoder
from dynamiccl.train.recipe import Recipe


class AttentionWindow(nn.Module):
    """A query that is learned looks at the calls; padding is left out."""

    def __init__(self, window_shape: tuple[int, int]) -> None:
        super().__init__()
        self.width = 32  # of what forward() returns; the trunk asks for it
        self.key = nn.Linear(window_shape[1], self.width)
        self.value = nn.Linear(window_shape[1], self.width)
        self.query = nn.Parameter(torch.zeros(self.width))

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """From windows (batch, calls, features) to (batch, width)."""
        is_call = window[:, :, 0] > 0.5  # the feature `valid`
        score = self.key(window).matmul(self.query).masked_fill(~is_call, -1e9)
        weight = torch.softmax(score, dim=1) * is_call.to(window.dtype)
        return (weight.unsqueeze(2) * self.value(window)).sum(dim=1)


register_window_encoder("attention", AttentionWindow)


def recipe() -> Recipe:
    """What `--recipe attention.py` trains."""
    return Recipe(
        name="attention",
        summary="double DQN, dueling, attention over the window",
        algorithm="DoubleDQN",
        window_encoder="attention",
        gamma=0.5,
        num_steps=3,
    )
