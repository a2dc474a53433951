"""Checked conversion of JSON values; None for a value of another type."""

import ast
import math
from typing import Any, Final

#: Columns hold 64 bits.
_MOST: Final = 1 << 62


def whole(value: object) -> int | None:
    """A non-negative integer."""
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    return int(str(value)) if is_whole and 0 <= int(str(value)) < _MOST else None


def number(value: object) -> float | None:
    """A finite number of less than 10^18, for moments and times."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < 1e18 and math.isfinite(value) else None


def ranks(value: object) -> tuple[int, ...] | None:
    """`[0, 1]`, as a list or as text; None where it is shortened (`[0, 1, ..., 63]`) or empty."""
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return None
    if not isinstance(value, list | tuple):
        return None
    found = tuple(rank for each in value if (rank := whole(each)) is not None)
    return found if found and len(found) == len(value) else None


def elements(shapes: object) -> int | None:
    """Elements of all tensors together, by their shapes."""
    if not isinstance(shapes, list):
        return None
    total = 0
    for shape in shapes:
        lengths = [whole(each) for each in shape] if isinstance(shape, list) else [None]
        if any(each is None for each in lengths):
            return None
        total += math.prod(each for each in lengths if each is not None)
    return whole(total)


def text(value: object) -> str | None:
    """Non-empty text."""
    return value if isinstance(value, str) and value not in {"", "undefined"} else None


def group_text(*told: object) -> str | None:
    """A group's name and description in one text."""
    return ":".join(each for value in told if (each := text(value)) is not None) or None


def mapping(value: object) -> dict[str, Any]:
    """A JSON object; an empty one for anything else."""
    return value if isinstance(value, dict) else {}


def listed(value: object) -> list[Any]:
    """A JSON list; an empty one for anything else."""
    return value if isinstance(value, list) else []
