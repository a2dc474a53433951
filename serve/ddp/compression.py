"""Algorithm 2 on one bucket: pruning, the k largest, 16-bit values, and the way back.

n values of a bucket, k of them sent, N ranks. A rank sends k positions of 32 bits, then k values,
padded with zeros. Law, to rounding: sent + error feedback + pruned = gradient + feedback before.

`topk` of 11.5 M values takes 0.2-0.4 s of a CPU core. So a sample of 32,768 gives a threshold that
slightly more than k exceed, and `topk` chooses among these. One call in forty needs a second, lower
one; rarely even that finds fewer than k. A CPU's pass goes in blocks that fit the cache: 10 ms, not
30. Error feedback is kept by parameter: DDP makes other buckets after a process's first step.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from dynamiccl.errors import UserError
from dynamiccl.serve.ddp.laws import INDEX_BYTES, Decision

SAMPLE: Final = 1 << 15
#: Standard deviations of the sample's tail that are aimed at beyond k, by turns.
_MARGINS: Final = (2.0, 8.0)
#: Positions that a sample moves by turn: no multiple of a matrix's rows or columns.
_SHIFT: Final = 7919
_BLOCK: Final = 1 << 18


def blocks(numel: int, device: torch.device) -> Iterator[slice]:
    """Parts for one pass: on a CPU of a cache's size, elsewhere one."""
    size = _BLOCK if device.type == "cpu" else max(1, numel)
    for start in range(0, numel, size):
        yield slice(start, min(numel, start + size))


def largest(values: torch.Tensor, k: int, turn: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Ascending positions and values of the k largest |`values`| (n,), without zeros."""
    numel = values.numel()
    if numel <= SAMPLE:
        return _choose(*_above(values, 0.0), k)
    # An odd stride does not stay in one column.
    steps = torch.arange(SAMPLE, device=values.device) * ((numel // SAMPLE) | 1)
    sample = values[(steps + turn * _SHIFT) % numel].abs_()
    tail = k / numel * SAMPLE
    for margin in _MARGINS:
        wanted = min(SAMPLE, int(tail + margin * tail**0.5) + 1)
        found = _above(values, float(sample.kthvalue(SAMPLE - wanted + 1).values))
        if len(found[0]) >= k:
            break
    return _choose(*found, k)


def _above(values: torch.Tensor, threshold: float) -> tuple[torch.Tensor, torch.Tensor]:
    places, chosen = [], []
    for block in blocks(values.numel(), values.device):
        part = values[block]
        magnitudes = part.abs()
        above = magnitudes >= threshold if threshold > 0.0 else magnitudes > 0.0
        at = above.nonzero().squeeze(1)
        chosen.append(part[at])
        places.append(at.add_(block.start))
    return torch.cat(places), torch.cat(chosen)


def _choose(
    places: torch.Tensor, values: torch.Tensor, k: int
) -> tuple[torch.Tensor, torch.Tensor]:
    count = len(places)
    if count <= k:
        return places, values
    magnitudes = values.abs()
    # `topk` gives positions in no order, slow to read and to add up.
    wanted = magnitudes >= magnitudes.kthvalue(count - k + 1).values
    if int(wanted.sum()) > k:
        wanted = magnitudes.topk(k, sorted=False).indices.sort().values
    return places[wanted], values[wanted]


HALF_MAX: Final = 65504.0
#: Steps between looks at the weights, which move slowly.
PRUNE_EVERY: Final = 16
_RATE_BAND: Final = 0.05
_WEIGHT_SAMPLE: Final = 1 << 14


def compress(
    gradient: torch.Tensor,
    residual: torch.Tensor,
    decision: Decision,
    *,
    kept: torch.Tensor | None = None,
    turn: int = 0,
) -> torch.Tensor:
    """The bytes that a rank sends, (k * (4 + value bytes),), filled up to whole words.

    Args:
        gradient: (n,), any floating type.
        residual: (n,) of 32 bits, the error feedback; changed in place.
        decision: how many values, and of how many bits.
        kept: (n,) of bool, false where pruning takes out what would be sent, which is lost; None
            for no pruning.
        turn: any number that changes from step to step.

    A gradient that is not finite is sent as NaN in all places and leaves the error feedback as it
    was: every rank then sees it, as a GradScaler needs.
    """
    count = decision.count(gradient.numel())
    if not bool(torch.isfinite(gradient.sum())):
        nothing = torch.zeros(count, dtype=torch.int64, device=gradient.device)
        return _pack(nothing, torch.full_like(nothing, torch.nan, dtype=torch.float32), decision)
    residual.add_(gradient)
    if kept is not None:
        for block in blocks(residual.numel(), residual.device):
            # `masked_fill_` takes four times as long.
            residual[block].mul_(kept[block])
    places, found = largest(residual, count, turn)
    values = found.clamp(-HALF_MAX, HALF_MAX).half() if decision.quantised else found
    residual[places] = found - values.float()
    short = (0, count - len(places))
    places, values = (torch.nn.functional.pad(each, short) for each in (places, values))
    return _pack(places, values, decision)


def _pack(places: torch.Tensor, values: torch.Tensor, decision: Decision) -> torch.Tensor:
    sent = values.half() if decision.quantised else values
    packed = torch.cat((places.int().view(torch.uint8), sent.view(torch.uint8)))
    # The next rank's positions must begin at a word.
    return torch.nn.functional.pad(packed, (0, -packed.numel() % INDEX_BYTES))


def add_up(gathered: torch.Tensor, decision: Decision, ranks: int, out: torch.Tensor) -> None:
    """Write the mean of N ranks' messages, (N * bytes,), to `out` (n,), added in order."""
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
    """Which weights of a bucket are not small."""

    def __init__(self, scale: float) -> None:
        self._scale = scale
        self._step = 0
        self._rate = -1.0
        self._mask: torch.Tensor | None = None

    def kept(
        self, weights: list[torch.Tensor], decision: Decision, step: int
    ) -> torch.Tensor | None:
        """(n,) of bool, true where gradients may be sent; None: prune nothing."""
        rate = self._scale * (1.0 - decision.ratio)
        if rate <= 0.0:
            return None
        moved = abs(rate - self._rate) > _RATE_BAND
        if self._mask is None or moved or step >= self._step + PRUNE_EVERY:
            self._mask, self._rate, self._step = _largest(weights, rate), rate, step
        return self._mask


def _largest(weights: list[torch.Tensor], rate: float) -> torch.Tensor | None:
    """(n,) of bool, false for the share `rate` of the smallest weights, by a sample."""
    wide = [weight for weight in weights if weight.dim() > 1]
    total = sum(weight.numel() for weight in wide)
    if not total:
        return None
    stride = max(1, total // _WEIGHT_SAMPLE) | 1
    sample = torch.cat([w.detach().flatten()[::stride].abs().float() for w in wide])
    bound = sample.kthvalue(max(1, int(rate * len(sample)))).values
    kept = [(w.detach().abs() > (bound if w.dim() > 1 else -1.0)).flatten() for w in weights]
    return torch.cat(kept)


#: Names of a bucket's parameters, and their numbers of values.
Layout = tuple[tuple[str, int], ...]


class Residuals:
    """One flat tensor of 32 bits a bucket, made when first needed."""

    def __init__(self) -> None:
        self._flats: dict[Layout, torch.Tensor] = {}
        #: By parameter: a view of a flat tensor, or a checkpoint's.
        self._parts: dict[str, torch.Tensor] = {}

    def of(self, layout: Layout, device: torch.device) -> torch.Tensor:
        """What a bucket owes, (n,), to be changed in place."""
        if layout not in self._flats:
            # Older buckets with these parameters are gone.
            names = dict(layout).keys()
            self._flats = {of: flat for of, flat in self._flats.items() if not names & dict(of)}
            sizes = [numel for _, numel in layout]
            flat = torch.zeros(sum(sizes), dtype=torch.float32, device=device)
            for name, view in zip(names, torch.split(flat, sizes), strict=True):
                if name in self._parts:
                    view.copy_(self._parts[name].reshape(-1))
                self._parts[name] = view
            self._flats[layout] = flat
        return self._flats[layout]

    def take(self, layout: Layout, device: torch.device) -> torch.Tensor | None:
        """As `of`, then forgotten; None: nothing owed (adding zeros costs as much as the sum)."""
        if not self._parts.keys() & dict(layout):
            return None
        flat = self.of(layout, device)
        del self._flats[layout]
        for name, _ in layout:
            del self._parts[name]
        return flat

    def state(self) -> dict[str, torch.Tensor]:
        """Copies by parameter name, on the CPU."""
        return {name: value.detach().cpu().clone() for name, value in self._parts.items()}

    def restore(self, state: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Go on from `state`; raises UserError where a model of these `sizes` does not fit it."""
        for name, value in state.items():
            if sizes.get(name) != value.numel():
                raise UserError(
                    f"error feedback of parameter '{name}' has {value.numel()} values, the "
                    f"model's has {sizes.get(name, 'no such parameter')}: load the state_dict of "
                    f"a job with the same model"
                )
        self._flats.clear()
        self._parts = {name: value.float() for name, value in state.items()}
