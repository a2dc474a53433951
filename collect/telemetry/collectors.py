"""Asking for readings: what answers is kept, what is denied is said once and not asked again."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

#: Told (device, counter, error) once for each thing that cannot be read.
Report = Callable[[str, str, str], None]


class Refused(Exception):
    """Raised when a reading was not given; `lasting` when asking again is of no use."""

    def __init__(self, message: str, *, lasting: bool) -> None:
        """Say why."""
        super().__init__(message)
        self.lasting = lasting


@dataclass(frozen=True, slots=True)
class Reading:
    """One question to one device, and the counters that its answer fills, in this order."""

    device: str
    counters: tuple[str, ...]
    ask: Callable[[], tuple[float, ...]]


class Group:
    """Readings that are taken together, at one rate."""

    def __init__(self, name: str, readings: Iterable[Reading], report: Report) -> None:
        """Ask everything once; what is refused for good does not become a column."""
        self.name = name
        self._report = report
        self._said: set[Reading] = set()
        self._asked = [reading for reading in readings if self._answers(reading)]
        self._dead: set[Reading] = set()

    @property
    def columns(self) -> list[tuple[str, str]]:
        """(device, counter) of each value that `read` returns."""
        return [(reading.device, name) for reading in self._asked for name in reading.counters]

    def read(self) -> list[float | None]:
        """One value for each column; None where there is none this time."""
        values: list[float | None] = []
        for reading in self._asked:
            if reading in self._dead:
                values += [None] * len(reading.counters)
                continue
            try:
                values += reading.ask()
            except Refused as error:
                self._note(reading, error)
                values += [None] * len(reading.counters)
        return values

    def _answers(self, reading: Reading) -> bool:
        try:
            reading.ask()
        except Refused as error:
            self._say(reading, error)
            return not error.lasting
        return True

    def _note(self, reading: Reading, error: Refused) -> None:
        if error.lasting:
            self._dead.add(reading)
        self._say(reading, error)

    def _say(self, reading: Reading, error: Refused) -> None:
        if reading not in self._said:
            self._said.add(reading)
            for name in reading.counters:
                self._report(reading.device, name, str(error))
