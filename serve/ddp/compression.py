"""Algorithm 2 on one bucket: pruning, the k largest, 16-bit values, and the way back.

n is the number of values of a bucket, k that of values sent, N the number of ranks. What a rank
sends is k positions of 32 bits and then k values, as bytes: equal on all ranks, short ones padded
with zeros. Law: sent + error feedback + pruned = gradient + error feedback before, to rounding.
"""

from typing import Final

import torch

from dynamiccl.serve.ddp.topk import blocks, largest
from dynamiccl.serve.ddp.wire import INDEX_BYTES, Decision

HALF_MAX: Final = 65504.0
#: Weights move slowly: which of them are small is looked at so often.
PRUNE_EVERY: Final = 16
#: ... and when the pruning rate moved by more than this.
_RATE_BAND: Final = 0.05


def compress(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    decision: Decision,
    *,
    kept: torch.Tensor | None = None,
    prune_to_residual: bool = False,
    turn: int = 0,
) -> torch.Tensor:
    """The bytes that a rank sends, (k * (4 + value bytes),), filled up to whole words.

    Args:
        gradient: (n,), any floating type.
        residual: (n,) of 32 bits, the error feedback; changed in place.
        decision: how many values, and of how many bits.
        kept: (n,) of bool, false where pruning forbids to send; None for no pruning.
        prune_to_residual: whether the error feedback keeps what is not sent for pruning. If not
            that is lost.
        turn: any number that changes from step to step.

    A gradient that is not finite is sent as NaN in all places and leaves the error feedback as it
    was: every rank then sees it, as a GradScaler needs.
    """
    count = decision.count(gradient.numel())
    if not bool(torch.isfinite(gradient.sum())):
        nothing = torch.zeros(count, dtype=torch.int64, device=gradient.device)
        return _pack(nothing, torch.full_like(nothing, torch.nan, dtype=torch.float32), decision)
    residual.add_(gradient)
    if kept is not None and not prune_to_residual:
        for block in blocks(residual.numel(), residual.device):
            # Not `masked_fill_`, which takes four times as long.
            residual[block].mul_(kept[block])
        kept = None
    found = largest(residual, count, turn, kept=kept)
    places, values = found.places, _rounded(found.values, decision)
    residual[places] = found.values - values.float()
    short = count - places.numel()
    if short:
        places = torch.nn.functional.pad(places, (0, short))
        values = torch.nn.functional.pad(values, (0, short))
    return _pack(places, values, decision)


def _rounded(values: torch.Tensor, decision: Decision) -> torch.Tensor:
    """As they are sent; what 16 bits cannot hold stays in the error feedback."""
    return values.clamp(-HALF_MAX, HALF_MAX).half() if decision.quantised else values


def _pack(places: torch.Tensor, values: torch.Tensor, decision: Decision) -> torch.Tensor:
    sent = values.half() if decision.quantised else values
    packed = torch.cat((places.int().view(torch.uint8), sent.view(torch.uint8)))
    # Whole words: the next rank's positions must begin at one.
    return torch.nn.functional.pad(packed, (0, -packed.numel() % INDEX_BYTES))


def add_up(gathered: torch.Tensor, decision: Decision, ranks: int, out: torch.Tensor) -> None:
    """Write the mean of what N ranks sent, (N * bytes,), to `out` (n,); the same on every rank.

    Ranks are added in their order, so that rounding is the same everywhere.
    """
    count = decision.count(out.numel())
    mean = out.zero_() if out.dtype == torch.float32 else torch.zeros_like(out, dtype=torch.float32)
    kind = torch.float16 if decision.quantised else torch.float32
    for packed in gathered.chunk(ranks):
        places = packed[: count * INDEX_BYTES].view(torch.int32)
        values = packed[count * INDEX_BYTES :].view(kind)[:count]
        mean.scatter_add_(0, places.long(), values.float().mul(1.0 / ranks))
    if mean is not out:
        out.copy_(mean)


class Pruning:
    """Which weights of a bucket are not small, looked at every few steps."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._step = 0
        self._rate = -1.0
        self._mask: torch.Tensor | None = None

    def kept(
        self, weights: list[torch.Tensor], decision: Decision, step: int
    ) -> torch.Tensor | None:
        """(n,) of bool, true where gradients may be sent; None when there is nothing to prune.

        The rate is scale * (1 - ratio); the bound is taken from a sample of all weights that have
        more than one dimension, as the threshold of the k largest is.
        """
        rate = self._scale * (1.0 - decision.ratio)
        if rate <= 0.0:
            return None
        moved = abs(rate - self._rate) > _RATE_BAND
        if self._mask is None or moved or step >= self._step + PRUNE_EVERY:
            self._mask, self._rate, self._step = _largest(weights, rate), rate, step
        return self._mask


_WEIGHT_SAMPLE: Final = 1 << 14


def _largest(weights: list[torch.Tensor], rate: float) -> torch.Tensor | None:
    """(n,) of bool: all but the share `rate` of weights that is nearest to zero."""
    wide = [weight for weight in weights if weight.dim() > 1]
    total = sum(weight.numel() for weight in wide)
    if not total:
        return None
    sample = torch.cat(
        [
            weight.detach().flatten()[:: max(1, total // _WEIGHT_SAMPLE) | 1].abs().float()
            for weight in wide
        ]
    )
    bound = sample.kthvalue(max(1, int(rate * sample.numel()))).values
    return torch.cat(
        [
            (weight.detach().abs() > bound).flatten()
            if weight.dim() > 1
            else torch.ones(weight.numel(), dtype=torch.bool, device=weight.device)
            for weight in weights
        ]
    )
