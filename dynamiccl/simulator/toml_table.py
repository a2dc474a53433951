"""Helpers for TOML files: strict tables, names checked against a registry, TOML output."""

import json
import re
import tomllib
from collections.abc import Callable, Collection, Mapping
from typing import Final, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from dynamiccl.errors import DynamicclError, UnknownName, UserError, near_name

T = TypeVar("T", bound=BaseModel)
_WIDTH: Final = 110
_UNKNOWN_KEY: Final = "unknown_key"
_BARE_KEY: Final = re.compile(r"[A-Za-z0-9_-]+")


class Table(BaseModel):
    """A frozen model that refuses unknown keys, NaN and infinities."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _knows_its_keys(cls, table: object) -> object:
        # First of all: a misspelt key is why its right spelling is missing.
        for key in table if isinstance(table, Mapping) else ():
            if key not in cls.model_fields:
                near, known = near_name(key, cls.model_fields), ", ".join(cls.model_fields)
                told = {"key": key, "near": near, "known": known}
                text = "unknown key '{key}'{near}; known keys are {known}"
                raise PydanticCustomError(_UNKNOWN_KEY, text, told)
        return table


def first_problem(error: Exception) -> str:
    """The first error of a document on one line: key, problem, value."""
    if not isinstance(error, ValidationError):
        return str(error)
    [first, *_] = error.errors()
    key = ".".join(str(part) for part in first["loc"])
    told = f"{key}: " * bool(key) + first["msg"].removeprefix("Value error, ")
    if first["type"] == "missing":
        return f"{told}; add it"
    return told if first["type"] == _UNKNOWN_KEY else f"{told} (got {first['input']!r:.60})"


def parse_toml(model: type[T], text: bytes, *, where: str) -> T:
    """The model of a TOML text. Raises UserError with file, key, value and problem."""
    try:
        return model.model_validate(tomllib.loads(text.decode()))
    except UnicodeDecodeError as error:
        raise UserError(f"{where} is not TOML: {error}; save it as UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise UserError(f"{where} is not TOML: {error}; correct that line") from error
    except (ValidationError, DynamicclError) as error:
        raise UserError(f"{where}: {first_problem(error)}") from error


def one_of(what: str, choices: Collection[str]) -> AfterValidator:
    """A validator for names of a registry; its error lists them."""

    def check(name: str) -> str:
        if name not in choices:
            raise ValueError(str(UnknownName(what, name, choices)))
        return name

    return AfterValidator(check)


def toml_value(value: object, *, number: Callable[[float], str] = repr) -> str:
    """A value as TOML.

    >>> toml_value({"sizes": [1, "4K"], "quiet": True})
    '{ sizes = [1, "4K"], quiet = true }'
    """
    if isinstance(value, Mapping):
        pairs = [f"{toml_key(k)} = {toml_value(v, number=number)}" for k, v in value.items()]
        return "{ " + ", ".join(pairs) + " }" if pairs else "{}"
    if isinstance(value, tuple | list):
        items = [toml_value(one, number=number) for one in value]
        line = "[" + ", ".join(items) + "]"
        long = "[\n" + "".join(f"    {item},\n" for item in items) + "]"
        return line if len(line) <= _WIDTH else long
    return number(value) if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


def toml_key(key: str) -> str:
    """A key as TOML writes it."""
    return key if _BARE_KEY.fullmatch(key) else json.dumps(key, ensure_ascii=False)
