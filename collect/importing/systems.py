"""Facts of known systems that benchmark output does not print, from a TOML file.

    [systems."b300-nvlink"]
    name = "b300"                  # optional: rename the system
    compute_capability = 10.3
    nvlink_generation = 5
    nvswitch = true
    nic_kind = "none"

Keys are columns of the measurements schema. A system without a table gets no facts.
"""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dynamiccl.datasets.store import check_slug
from dynamiccl.errors import MissingPath, UnknownName, UserError


class SystemFacts(BaseModel):
    """Facts of one system; None = unknown. Names and units are those of the schema's columns."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    #: New hive directory, where the one in the data is unwieldy.
    name: str | None = None
    compute_capability: float | None = Field(default=None, ge=3.0, le=100.0)
    nvlink_generation: int | None = Field(default=None, ge=0, le=100)
    nvlinks_per_gpu: int | None = Field(default=None, ge=0, le=1000)
    nvswitch: bool | None = None
    nic_kind: Literal["infiniband", "roce", "efa", "socket", "none"] | None = None
    nic_gbits_per_s: float | None = Field(default=None, ge=0.0)
    nics_per_node: int | None = Field(default=None, ge=0)
    cpu_vendor: Literal["intel", "amd", "arm"] | None = None


@dataclass(frozen=True, slots=True)
class KnownSystems:
    """All systems of one file, by the name that the data has for them."""

    facts: Mapping[str, SystemFacts]

    def columns_of(self, system: str) -> dict[str, Any]:
        """Columns to set on rows of `system`, a new system name among them."""
        known = self.facts.get(system)
        if known is None:
            return {"system": system}
        columns = known.model_dump(exclude_none=True)
        name = columns.pop("name", system)
        return {**columns, "system": name}


def load_systems(path: Path | None) -> KnownSystems:
    """Read and check a systems file; None gives an empty catalogue.

    Raises MissingPath, and UserError or UnknownName with table, key, value and choices.
    """
    if path is None:
        return KnownSystems({})
    if not path.is_file():
        raise MissingPath("systems file", path, "write one with a [systems.NAME] table")
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not TOML: {error}; correct that line") from error
    for key in content:
        if key != "systems":
            raise UnknownName("table", key, ["systems"], where=str(path))
    tables = content.get("systems", {})
    if not isinstance(tables, dict):
        raise UserError(f"{path}: 'systems' is {tables!r}; write tables like [systems.NAME]")
    return KnownSystems({name: _facts(path, name, table) for name, table in tables.items()})


def _facts(path: Path, name: str, table: object) -> SystemFacts:
    where = f"{path}: systems.{name}"
    if not isinstance(table, dict):
        raise UserError(f"{where} is {table!r}; write a table [systems.{name}]")
    for key in table:
        if key not in SystemFacts.model_fields:
            raise UnknownName("key", key, list(SystemFacts.model_fields), where=where)
    try:
        facts = SystemFacts.model_validate(table)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"])
        raise UserError(
            f"{where}: {key} = {first.get('input')!r} is wrong: {first['msg']}"
        ) from error
    check_slug(facts.name or name, "system")
    return facts
