"""Configs that hung or crashed, and the size from which each is skipped."""

from dataclasses import dataclass, field

from dynamiccl.collect.grid import Setting, Trial
from dynamiccl.nccl import Config


@dataclass(slots=True)
class Quarantine:
    """What is not tried again: a config of one setting, from the size at which it failed on.

    Published sweeps saw configs that run at small sizes and hang at large ones (LL from 128 KiB
    over sockets), so smaller sizes stay in.
    """

    _from: dict[tuple[Setting, Config], tuple[int, str]] = field(default_factory=dict)

    def add(self, trial: Trial, reason: str) -> None:
        """Skip the config of `trial` at its size and above."""
        key = (trial.setting, trial.config)
        size, _ = self._from.get(key, (trial.size_bytes, ""))
        if trial.size_bytes <= size:
            self._from[key] = (trial.size_bytes, reason)

    def reason(self, trial: Trial) -> str | None:
        """Why `trial` is skipped, or None."""
        found = self._from.get((trial.setting, trial.config))
        if found is None or trial.size_bytes < found[0]:
            return None
        return f"not tried: {trial.config.key} {found[1]} at {found[0]} bytes"
