"""Which trials are skipped: configs too slow to win, and those that run the same as another one."""

from collections.abc import Mapping, Sequence

from dynamiccl.collect.benchmark.grid import is_slow
from dynamiccl.collect.benchmark.read_back import PlainChoice
from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.nccl import Algorithm, Protocol

#: Key of trials that differ in the number of channels only.
_Family = tuple[Setting, int, Algorithm | None, Protocol | None, int | None]


class Needless:
    """Decides which trials of a sweep are skipped."""

    def __init__(self, slow_max_bytes: int) -> None:
        """Take up to which size the slowest configs are measured."""
        self._slow_max_bytes = slow_max_bytes
        self._families: dict[_Family, list[Trial]] = {}

    def know(self, trials: Sequence[Trial]) -> None:
        """Take in the trials of the sweep."""
        for trial in trials:
            if trial.config.num_channels is not None and trial.infeasible is None:
                self._families.setdefault(_family(trial), []).append(trial)

    def reason(self, trial: Trial, choices: Mapping[str, PlainChoice | None]) -> str | None:
        """Why a trial is skipped, or None; `choices`: trial key -> what NCCL runs for it."""
        if is_slow(trial.config) and trial.size_bytes > self._slow_max_bytes:
            return (
                f"left out above {self._slow_max_bytes} bytes, where LL and up to two channels "
                "take long and do not win (runner.slow_max)"
            )
        choice = choices.get(trial.key)
        family = self._families.get(_family(trial))
        if choice is None or family is None or trial.config.num_channels is None:
            return None
        alike = [other for other in family if choices.get(other.key) == choice]
        first = min(
            alike, key=lambda other: (other.config.num_channels != choice[2], _count(other))
        )
        if first.key == trial.key:
            return None
        return f"NCCL runs it as {first.config.key}, which is measured"


def _family(trial: Trial) -> _Family:
    config = trial.config
    return (*trial.task, config.algorithm, config.protocol, config.chunk_bytes)


def _count(trial: Trial) -> int:
    return trial.config.num_channels or 0
