"""RMSProp with a statistic shared by all actors, updated without a lock (Mnih et al. 2016).

    g <- alpha g + (1 - alpha) d^2,    theta <- theta - eta d / sqrt(g + epsilon)

`torch.optim.RMSprop` adds epsilon outside of the root, and keeps one statistic a process. With
`shared=False` each actor has a statistic of its own, the paper's other variant (S4).
"""

from collections.abc import Sequence
from typing import Final

import torch

_ALPHA: Final = 0.99
#: The paper gives no value; the common 0.1 would make it plain gradient descent here.
_EPSILON: Final = 1e-5


class SharedRmsProp:
    """Updates shared parameters with gradients of each process."""

    def __init__(self, parameters: Sequence[torch.Tensor], *, shared: bool = True) -> None:
        """Start with zero statistics, in shared memory."""
        self.parameters = list(parameters)
        self.epsilon = _EPSILON
        self.squares = [torch.zeros_like(each) for each in self.parameters]
        if shared:
            for each in self.squares:
                each.share_memory_()  # type: ignore[no-untyped-call]

    @torch.no_grad()
    def step(self, gradients: Sequence[torch.Tensor | None], rate: float) -> None:
        """One update; parameters without a gradient are unchanged."""
        for parameter, square, gradient in zip(
            self.parameters, self.squares, gradients, strict=True
        ):
            if gradient is not None:
                square.mul_(_ALPHA).addcmul_(gradient, gradient, value=1.0 - _ALPHA)
                parameter.addcdiv_(gradient, (square + self.epsilon).sqrt(), value=-rate)
