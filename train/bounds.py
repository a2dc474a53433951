"""Bounds of a setting, as an annotation: `steps: Annotated[int, Within(1, 10**8)]`."""

import math
from dataclasses import dataclass
from typing import Any, Final, get_type_hints

from dynamiccl.errors import UserError

#: Of each kind of open end, what stands before and behind the numbers.
_OPEN: Final = {False: ("from ", "to "), True: ("above ", "below ")}


@dataclass(frozen=True, slots=True)
class Within:
    """Lower and upper bound of a number, or of each number of a list."""

    low: float
    high: float
    #: Whether the least value, or the largest, is itself too little, or too much.
    low_is_open: bool = False
    high_is_open: bool = False

    def holds(self, value: float) -> bool:
        """Whether `value` is within the bounds; NaN never is."""
        if not math.isfinite(value):
            return False
        above = value > self.low if self.low_is_open else value >= self.low
        return above and (value < self.high if self.high_is_open else value <= self.high)

    def __str__(self) -> str:
        """The bounds as text for an error.

        >>> str(Within(0, 1, low_is_open=True)), str(Within(1, 10))
        ('above 0 to 1', 'from 1 to 10')
        """
        low, high = _OPEN[self.low_is_open][0], _OPEN[self.high_is_open][1]
        return f"{low}{self.low:g} {high}{self.high:g}"


def bounds_of(kind: type) -> dict[str, Within]:
    """Field -> bounds, for fields that have any."""
    hints = get_type_hints(kind, include_extras=True)
    return {
        name: each
        for name, hint in hints.items()
        for each in getattr(hint, "__metadata__", ())
        if isinstance(each, Within)
    }


def check_bounds(settings: Any, where: str) -> None:
    """Raise UserError for a field (or list item) outside its bounds; `where` names the owner."""
    for name, bounds in bounds_of(type(settings)).items():
        value = getattr(settings, name)
        listed = value if isinstance(value, tuple) else (value,)
        if not listed:
            raise UserError(f"{name} of {where} is an empty list; give numbers {bounds}")
        for each in listed:
            if not bounds.holds(each):
                raise UserError(f"{name}={each} of {where} is out of bounds; give one {bounds}")
