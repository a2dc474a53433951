"""The history table: what was measured of a task key, by action; the leader keeps it."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Record:
    """Times of one action."""

    calls: int = 0
    total_us: float = 0.0
    least_us: float = float("inf")

    @property
    def mean_us(self) -> float:
        """Mean time."""
        return self.total_us / self.calls


@dataclass(slots=True)
class HistoryTable:
    """Everything that was told about one task key."""

    records: dict[int, Record] = field(default_factory=dict)
    calls: int = 0
    #: Calls that ran another action than the incumbent of that moment.
    probes: int = 0

    def add(self, action: int, time_us: float, *, is_probe: bool) -> None:
        """One call. Raises ValueError for a time that is not above zero."""
        if not time_us > 0.0:
            raise ValueError(f"a call cannot have taken {time_us} us")
        record = self.records.get(action)
        if record is None:
            record = self.records[action] = Record()
        record.calls += 1
        record.total_us += time_us
        record.least_us = min(record.least_us, time_us)
        self.calls += 1
        self.probes += is_probe
