"""A table of a file that a person writes, and names in it that must be among known ones."""

from collections.abc import Collection

from pydantic import AfterValidator, BaseModel, ConfigDict

from dynamiccl.errors import UnknownName


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
