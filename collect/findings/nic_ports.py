"""NIC ports that lose packets repeatedly, by the samplers' counters beside each row."""

from dataclasses import dataclass
from typing import Final

import polars as pl

#: A port is named when it is the worst of its rows so often, and in most of these: a packet is lost
#: now and then anywhere, and where all ports lose some none of them is to blame.
_LEAST_ROWS: Final = 3
_MOST: Final = 0.5


@dataclass(frozen=True, slots=True)
class LossyPort:
    """A port that lost or resent packets."""

    #: HOST DEVICE/PORT.
    name: str
    #: Rows in which it was the worst port.
    rows: int
    #: What all ports counted in these.
    retries: int

    @property
    def text(self) -> str:
        """A line of text."""
        return f"{self.name} in {self.rows} rows ({self.retries} packets lost or sent again)"


def lossy_ports(frame: pl.DataFrame) -> list[LossyPort]:
    """The ports that are the worst one in most rows with retries; often none."""
    told = frame.filter((pl.col("nic_retries") > 0) & pl.col("nic_worst").is_not_null())
    by_port = told.group_by("nic_worst").agg(pl.len(), pl.col("nic_retries").sum())
    return [
        LossyPort(*row)
        for row in by_port.sort("len", "nic_worst", descending=[True, False]).iter_rows()
        if row[1] >= _LEAST_ROWS and row[1] > _MOST * told.height
    ]
