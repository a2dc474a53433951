"""One golden, how two values are compared, and how a value is kept."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

DATA: Final = Path(__file__).with_name("data")
#: Figures are equal within this share: machines differ in the last bits.
RELATIVE: Final = 1e-9
#: What fits is kept on one line.
_WIDTH: Final = 200
#: So many differences say enough.
_SHOWN: Final = 20

Comparer = Callable[[Any, Any], list[str]]


def equal_values(kept: Any, made: Any) -> list[str]:
    """Differences between two JSON values, at most 20.

    Of an object only the keys that the kept one has count, so what is added later is free. Lists
    are equal by length and item, figures within one part in 1e9.
    """
    return close_values(RELATIVE)(kept, made)


def close_values(relative: float) -> Comparer:
    """As `equal_values`, with figures that are equal within another share."""

    def compare(kept: Any, made: Any) -> list[str]:
        found = list(_differences(kept, made, "value", relative))
        rest = [f"and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        return found[:_SHOWN] + rest

    return compare


def _differences(kept: Any, made: Any, place: str, relative: float) -> Iterator[str]:
    if isinstance(kept, dict) and isinstance(made, dict):
        for key, value in kept.items():
            if key in made:
                yield from _differences(value, made[key], f"{place}.{key}", relative)
            else:
                yield f"{place}.{key}: {_short(value)} was kept, and now there is none"
    elif isinstance(kept, list) and isinstance(made, list):
        if len(kept) != len(made):
            yield f"{place}: {len(kept)} items were kept, now there are {len(made)}"
        for number, (one, other) in enumerate(zip(kept, made, strict=False)):
            yield from _differences(one, other, f"{place}[{number}]", relative)
    elif not _same(kept, made, relative):
        yield f"{place}: {_short(kept)} was kept, now it is {_short(made)}"


def _same(kept: Any, made: Any, relative: float) -> bool:
    figures = [isinstance(x, int | float) and not isinstance(x, bool) for x in (kept, made)]
    if all(figures):
        return math.isclose(kept, made, rel_tol=relative, abs_tol=1e-12)
    return type(kept) is type(made) and bool(kept == made)


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= _WIDTH else f"{text[:_WIDTH]}..."


def same_share(least: float) -> Comparer:
    """Compares lists of decisions: equal in `least` of places."""

    def compare(kept: Any, made: Any) -> list[str]:
        if len(kept) != len(made):
            return [f"{len(kept)} decisions were kept, now there are {len(made)}"]
        others = [
            number
            for number, pair in enumerate(zip(kept, made, strict=True))
            if equal_values(*pair)
        ]
        if len(others) <= (1.0 - least) * len(kept):
            return []
        first = others[0]
        return [
            f"{len(others)} of {len(kept)} decisions are others, more than {1 - least:.0%}; number "
            f"{first}: {_short(kept[first])} was kept, now it is {_short(made[first])}"
        ]

    return compare


@dataclass(frozen=True)
class Golden:
    """A value that a command makes, and how it is compared with what was kept.

    `make` gets an empty directory and returns a JSON value; where something is absent that it
    needs, it calls `pytest.skip` with the reason. `compare` takes kept and made and returns the
    differences, none where they are equal. `name` begins with the module's name and a dash.
    """

    name: str
    make: Callable[[Path], Any]
    compare: Comparer = equal_values

    @property
    def path(self) -> Path:
        """Where it is kept."""
        return DATA / f"{self.name}.json"

    def differences(self, directory: Path) -> list[str]:
        """Make it in an empty directory and compare; raises FileNotFoundError if none is kept."""
        return self.compare(self.kept(), as_json(self.make(directory)))

    def kept(self) -> Any:
        """What is kept."""
        return json.loads(self.path.read_bytes())

    def write(self, directory: Path) -> Path:
        """Make it in an empty directory and keep it."""
        DATA.mkdir(exist_ok=True)
        self.path.write_text(written(as_json(self.make(directory))), encoding="utf-8")
        return self.path


def as_json(value: Any) -> Any:
    """The value as it is after it was kept: tuples are lists, keys are text."""
    return json.loads(json.dumps(value, allow_nan=False))


def written(value: Any) -> str:
    """JSON in which a row is a line: what is short or a list of plain values is not broken.

    >>> written({"a": [1, 2]})
    '{"a": [1, 2]}\\n'
    """
    return _text(value, "") + "\n"


def _text(value: Any, indent: str) -> str:
    whole = json.dumps(value, ensure_ascii=False)
    holds = list(value.values() if isinstance(value, dict) else value) if _nested(value) else []
    if not any(_nested(item) for item in holds) and not isinstance(value, dict):
        return whole
    if len(whole) + len(indent) <= _WIDTH:
        return whole
    inner = f"{indent} "
    if isinstance(value, dict):
        items = [f"{inner}{json.dumps(k)}: {_text(v, inner)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    items = [inner + _text(item, inner) for item in value]
    return "[\n" + ",\n".join(items) + f"\n{indent}]"


def _nested(value: Any) -> bool:
    return isinstance(value, dict | list)
