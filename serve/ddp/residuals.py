"""Error feedback: what each parameter's gradient still owes, whatever bucket it travels in.

DDP makes its buckets anew after the first step of a process, so a checkpoint holds one tensor for
each parameter name; between two steps they lie side by side, as in the buckets.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from dynamiccl.errors import UserError


@dataclass(frozen=True, slots=True)
class Piece:
    """A parameter in a bucket: its name and its number of values."""

    name: str
    numel: int


Layout = tuple[Piece, ...]


class Residuals:
    """One flat tensor of 32 bits for each bucket, made when it is first needed."""

    def __init__(self) -> None:
        self._flats: dict[Layout, torch.Tensor] = {}
        self._parts: dict[str, torch.Tensor] = {}

    def of(self, layout: Layout, device: torch.device) -> torch.Tensor:
        """What a bucket owes, (n,), to be changed in place; zeros at first."""
        flat = self._flats.get(layout)
        if flat is None:
            self._split({piece.name for piece in layout})
            flat = torch.zeros(
                sum(piece.numel for piece in layout), dtype=torch.float32, device=device
            )
            for piece, view in zip(layout, _views(flat, layout), strict=True):
                part = self._parts.pop(piece.name, None)
                if part is not None:
                    view.copy_(part.reshape(-1))
            self._flats[layout] = flat
        return flat

    def take(self, layout: Layout, device: torch.device) -> torch.Tensor | None:
        """What a bucket owes, (n,), which is forgotten here; None where nothing was kept back.

        For an exchange of all values: adding zeros in each step would cost as much as the sum.
        """
        names = {piece.name for piece in layout}
        kept = {piece.name for each in self._flats for piece in each} | self._parts.keys()
        if not names & kept:
            return None
        flat = self.of(layout, device)
        del self._flats[layout]
        return flat

    def state(self) -> dict[str, torch.Tensor]:
        """Copies by parameter name, on the CPU."""
        found = dict(self._parts)
        for layout, flat in self._flats.items():
            found |= {p.name: v for p, v in zip(layout, _views(flat, layout), strict=True)}
        return {name: value.detach().cpu().clone() for name, value in found.items()}

    def restore(self, state: Mapping[str, torch.Tensor], sizes: Mapping[str, int]) -> None:
        """Go on from `state`; raises UserError where it is not of a model with these `sizes`."""
        for name, value in state.items():
            if sizes.get(name) != value.numel():
                raise UserError(
                    f"error feedback of parameter '{name}' has {value.numel()} values, the "
                    f"model's has {sizes.get(name, 'no such parameter')}: load the state_dict of "
                    f"a job with the same model"
                )
        self._flats.clear()
        self._parts = {name: value.float() for name, value in state.items()}

    def _split(self, names: set[str]) -> None:
        """Take buckets apart that share a parameter with a new one."""
        for layout in [each for each in self._flats if names & {p.name for p in each}]:
            views = _views(self._flats.pop(layout), layout)
            self._parts |= {p.name: v for p, v in zip(layout, views, strict=True)}


def _views(flat: torch.Tensor, layout: Sequence[Piece]) -> tuple[torch.Tensor, ...]:
    return torch.split(flat, [piece.numel for piece in layout])
