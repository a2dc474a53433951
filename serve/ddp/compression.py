"""Algorithm 2 on one bucket: pruning, the k largest, 16-bit values.

n values of a bucket, k of them sent, N ranks, at positions that are each rank's own or shared
(docs/ddp-hook.md; with one chooser for all: ScaleCom, Chen et al. 2020). Law, to rounding: sent +
error feedback + pruned = gradient + feedback before.

`topk` of 11.5 M values takes 0.2-0.4 s of a CPU core. So a sample of 32,768 gives a threshold that
slightly more than k exceed, and `topk` chooses among these. One call in forty needs a second, lower
one; rarely even that finds fewer than k. A CPU's pass goes in blocks that fit the cache: 10 ms, not
30. Error feedback is kept by parameter: DDP makes other buckets after a process's first step.
"""

from collections.abc import Iterator, Mapping
from typing import Final

import torch

from dynamiccl.errors import UserError
from dynamiccl.serve.ddp.laws import Decision

SAMPLE: Final = 1 << 15
#: Standard deviations of the sample's tail that are aimed at beyond k, by turns.
_MARGINS: Final = (2.0, 8.0)
#: Positions that a sample moves by turn: no multiple of a matrix's rows or columns.
_SHIFT: Final = 7919
_BLOCK: Final = 1 << 18


def blocks(numel: int, device: torch.device) -> Iterator[slice]:
    """Parts for one pass: on a CPU of a cache's size, elsewhere one."""
    size = _BLOCK if device.type == "cpu" else max(1, numel)
    for start in range(0, max(1, numel), size):
        yield slice(start, min(numel, start + size))


def largest(values: torch.Tensor, k: int, turn: int = 0) -> torch.Tensor:
    """Ascending positions of the k largest |`values`| (n,), without zeros."""
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
    """Positions and magnitudes."""
    places, chosen = [], []
    for block in blocks(values.numel(), values.device):
        magnitudes = values[block].abs()
        above = magnitudes >= threshold if threshold > 0.0 else magnitudes > 0.0
        at = above.nonzero().squeeze(1)
        chosen.append(magnitudes[at])
        places.append(at.add_(block.start))
    return torch.cat(places), torch.cat(chosen)


def _choose(places: torch.Tensor, magnitudes: torch.Tensor, k: int) -> torch.Tensor:
    count = len(places)
    if count <= k:
        return places
    # `topk` gives positions in no order, slow to read and to add up.
    wanted = magnitudes >= magnitudes.kthvalue(count - k + 1).values
    if int(wanted.sum()) > k:
        wanted = magnitudes.topk(k, sorted=False).indices.sort().values
    return places[wanted]


#: Of a sum in 16 bits, which holds 65504, but rounds at each rank.
HALF_MAX: Final = 65000.0
#: The paper's: this x (1 - ratio) of the weights, the smallest, send no gradients. Biases and norms
#: stay: many begin at 0.
PRUNING: Final = 0.5
#: Steps between looks at the weights, which move slowly.
PRUNE_EVERY: Final = 16
_RATE_BAND: Final = 0.05
_WEIGHT_SAMPLE: Final = 1 << 14


def owe(gradient: torch.Tensor, residual: torch.Tensor, kept: torch.Tensor | None) -> None:
    """Add a finite gradient (n,) to the error feedback (n,), of 32 bits, in place.

    Where `kept` (n,), of bool, is false, pruning takes out what would be sent, which is lost.
    """
    residual.add_(gradient)
    if kept is not None:
        for block in blocks(residual.numel(), residual.device):
            # `masked_fill_` takes four times as long.
            residual[block].mul_(kept[block])


def take(
    residual: torch.Tensor, places: torch.Tensor, decision: Decision, ranks: int, kind: torch.dtype
) -> torch.Tensor:
    """What a rank adds to the mean at distinct `places`, (k,); the rest is owed.

    Divided by `ranks` first, so that a sum in 16 bits fits, also if the gradient's `kind` has them.
    """
    found = residual[places]
    sent = found / ranks
    if decision.quantised or kind == torch.float16:
        sent.clamp_(-HALF_MAX / ranks, HALF_MAX / ranks)
    if decision.quantised:
        sent = sent.half()
    residual[places] = found.sub_(sent.float(), alpha=ranks)
    return sent


def add_up(
    gradient: torch.Tensor, places: torch.Tensor, values: torch.Tensor, ranks: int
) -> torch.Tensor:
    """The sum of all ranks' own `values` at their `places`, both (N * k,)."""
    mean = torch.zeros(len(gradient), device=gradient.device)
    # By rank: a GPU adds up equal positions in any order, another one on each rank.
    for at, value in zip(places.chunk(ranks), values.chunk(ranks), strict=True):
        mean.scatter_add_(0, at.long(), value.float())
    return gradient.copy_(mean)


def propose(
    residual: torch.Tensor, layout: "Layout", decision: Decision, share: int, ranks: int, turn: int
) -> torch.Tensor:
    """The next positions in a share of each parameter: its largest, of 32 bits, filled by -1."""
    starts, parts, begin = [], [], 0
    for _, numel in layout:
        starts.append(begin + numel * share // ranks)
        parts.append(residual[starts[-1] : begin + numel * (share + 1) // ranks])
        begin += numel
    count = decision.proposed(begin, ranks)
    found = largest(torch.cat(parts), count, turn)
    ends = torch.tensor([len(part) for part in parts], device=residual.device).cumsum(0)
    part = torch.searchsorted(ends, found, right=True)
    moved = torch.tensor(starts, device=residual.device)
    moved[1:] -= ends[:-1]
    places = found.add_(moved[part])
    return torch.nn.functional.pad(places, (0, count - len(places)), value=-1).int()


def shared_places(
    agreed: torch.Tensor | None, numel: int, count: int, turn: int, device: torch.device
) -> torch.Tensor:
    """What ranks agreed on, without -1; `count` evenly spread ones where they agreed on none."""
    if agreed is not None:
        known = agreed[agreed >= 0].long()
        if len(known):
            return known
    return (torch.arange(count, device=device) * (numel // count) + turn) % numel


class Pruning:
    """Which weights of a bucket are not small; mode paper's, for no help is shown."""

    def __init__(self) -> None:
        self._step = 0
        self._rate = -1.0
        self._mask: torch.Tensor | None = None

    def kept(
        self, weights: list[torch.Tensor], decision: Decision, step: int
    ) -> torch.Tensor | None:
        """(n,) of bool, true where gradients may be sent; None: prune nothing."""
        rate = PRUNING * (1.0 - decision.ratio)
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

    def scale(self, factor: float) -> None:
        """Multiply all that is owed."""
        for value in self._parts.values():
            value.mul_(factor)

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
