"""A table of a file that a person writes, and names in it that must be among known ones."""

import json
import re
from collections.abc import Callable, Collection, Mapping
from typing import Final

from pydantic import AfterValidator, BaseModel, ConfigDict

from dynamiccl.errors import UnknownName

_WIDTH: Final = 110
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


class Table(BaseModel):
    """Refuses unknown keys, NaN and infinities; never changes."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def one_of(what: str, choices: Collection[str]) -> AfterValidator:
    """Takes a name of a registry; the error lists what is in it."""

    def check(name: str) -> str:
        if name not in choices:
            raise ValueError(str(UnknownName(what, name, choices)))
        return name

    return AfterValidator(check)


def toml_value(value: object, *, number: Callable[[float], str] = repr) -> str:
    """A value as TOML: text, numbers, truth, lists and inline tables of them.

    >>> toml_value({"sizes": [1, "4K"], "quiet": True})
    '{ sizes = [1, "4K"], quiet = true }'
    """
    if isinstance(value, Mapping):
        pairs = [
            f"{toml_key(key)} = {toml_value(one, number=number)}" for key, one in value.items()
        ]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, tuple | list):
        return _list([toml_value(one, number=number) for one in value])
    return number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def toml_key(key: str) -> str:
    """A key as TOML writes it."""
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)


def _list(items: list[str]) -> str:
    line = "[" + ", ".join(items) + "]"
    if len(line) <= _WIDTH:
        return line
    return "[\n" + "".join(f"    {item},\n" for item in items) + "]"
