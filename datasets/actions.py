"""The action catalogue: the config of each action index; one catalogue for all systems.

A config with an AUTO knob is an action of its own: `Ring` with the protocol left to NCCL is not
`Ring/LL128`.
"""

from dataclasses import dataclass
from typing import Any, Final, Self

import polars as pl

from dynamiccl.datasets.schema import REQUESTED_COLUMNS
from dynamiccl.datasets.store import config_of, requested
from dynamiccl.errors import DataError
from dynamiccl.nccl import ABSTAIN, Config
from dynamiccl.schedule import config_columns

ABSTAIN_ACTION: Final = 0


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Configs by action index; `configs[0]` is ABSTAIN (NCCL's own choice)."""

    configs: tuple[Config, ...]

    def __post_init__(self) -> None:
        if not self.configs or self.configs[0] != ABSTAIN:
            raise DataError("a catalogue must begin with ABSTAIN")
        if len(set(self.configs)) != len(self.configs):
            raise DataError("a catalogue must not hold a config twice")

    def __len__(self) -> int:
        return len(self.configs)

    @classmethod
    def from_frame(cls, frame: pl.DataFrame) -> Self:
        """Every config requested in a measurements frame, in a stable order."""
        forced = frame.filter(~pl.col("is_default")).select(REQUESTED_COLUMNS).unique()
        configs = {config_of(row) for row in forced.iter_rows(named=True)} - {ABSTAIN}
        return cls((ABSTAIN, *sorted(configs, key=config_columns)))

    def actions(self, frame: pl.DataFrame) -> pl.Series:
        """Null where the catalogue lacks the config, and for another tuner's unknown choice."""
        forced = [(*requested(c).values(), i) for i, c in enumerate(self.configs) if c != ABSTAIN]
        types = {name: frame.schema[name] for name in REQUESTED_COLUMNS}
        known = pl.DataFrame(forced, schema={**types, "action": pl.Int64}, orient="row")
        found = frame.select("is_default", *REQUESTED_COLUMNS).join(
            known, on=REQUESTED_COLUMNS, how="left", nulls_equal=True, maintain_order="left"
        )
        action = pl.when("is_default").then(ABSTAIN_ACTION).otherwise("action")
        return found.select(action=action).to_series()

    def to_json(self) -> list[dict[str, Any]]:
        """Null = AUTO."""
        each = enumerate(self.configs)
        return [{"action": i, "name": config.key, **requested(config)} for i, config in each]
