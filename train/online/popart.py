"""PopArt: a critic whose targets are normalised, whatever the unit of rewards.

    mu <- (1 - beta) mu + beta mean(target), likewise nu of squares, sigma = sqrt(nu - mu^2)

The critic's last layer learns (target - mu) / sigma. When mu and sigma move, its weights are
changed so that mu + sigma x output stays what it was (van Hasselt et al. 2016, "Learning values
across many orders of magnitude", section 2). One scale for all keys; mvfst-rl leaves the scale of
rewards open (Sivakumar et al. 2019).
"""

from typing import Final

import torch
from torch import nn

_BETA: Final = 0.01
_LEAST: Final = 1e-4


class ValueScale(nn.Module):
    """Mean and deviation of targets; 0 and 1 until `follow` is called."""

    def __init__(self) -> None:
        """Start without a scale."""
        super().__init__()
        self.mean: torch.Tensor
        self.square: torch.Tensor
        self.register_buffer("mean", torch.tensor(0.0))
        self.register_buffer("square", torch.tensor(1.0))

    @property
    def std(self) -> torch.Tensor:
        """Deviation of targets."""
        return (self.square - self.mean.square()).clamp_min(_LEAST**2).sqrt()

    def forward(self, output: torch.Tensor) -> torch.Tensor:
        """Values of the last layer's outputs."""
        return self.mean + self.std * output

    @torch.no_grad()
    def follow(self, target_TR: torch.Tensor, weight_TR: torch.Tensor, last: nn.Linear) -> None:
        """Move towards targets (T, R), of which those of weight 0 do not count."""
        total = weight_TR.sum().clamp_min(1e-6)
        mean, std = self.mean.clone(), self.std
        for kept, found_TR in ((self.mean, target_TR), (self.square, target_TR.square())):
            kept.lerp_((found_TR * weight_TR).sum() / total, _BETA)
        last.weight.mul_(std / self.std)
        last.bias.mul_(std).add_(mean - self.mean).div_(self.std)
