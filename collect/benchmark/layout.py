"""The launches that measure a round of picks: one process for the whole grid, or one a config."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Final, TypeVar

from dynamiccl.collect.grid import LaunchProfile, Setting, Trial, walks
from dynamiccl.collect.runner import Launch, LaunchMode, Pick, Round
from dynamiccl.datasets.schema import DEFAULT_PROFILE
from dynamiccl.nccl import ABSTAIN, Config

#: Measurements of the reference default per size and round: an A/A pair.
REFERENCE_REPEATS: Final = 2
_Key = TypeVar("_Key", Setting, Config)


def lay_out(
    round_: Round,
    *,
    plays_schedules: bool,
    must_read_back: Callable[[Trial], bool],
    small_bytes: int = 0,
) -> tuple[Launch, ...]:
    """The launches of a round (pure).

    Args:
        round_: what is to be measured; feasible picks only.
        plays_schedules: whether a plugin can play many configs in one process.
        must_read_back: whether it is still to be found out what really runs for a trial.
        small_bytes: up to this size messages are timed in a process of their own, with more calls
            (`-n` holds for all that a process walks).
    """

    def timed(
        setting: Setting,
        mode: LaunchMode,
        name: str,
        picks: Sequence[Pick],
        *,
        scheduled: bool = False,
    ) -> list[Launch]:
        small = [pick for pick in picks if pick.trial.size_bytes <= small_bytes]
        large = [pick for pick in picks if pick.trial.size_bytes > small_bytes]
        return [
            launch
            for part in (small, large)
            for launch in _per_chain(round_, setting, mode, name, part, scheduled=scheduled)
        ]

    launches: list[Launch] = []
    by_setting = _grouped(round_.picks, lambda pick: pick.trial.setting)
    references: dict[Setting, list[int]] = {}
    for setting, picks in by_setting:
        scheduled = plays_schedules and setting.collective.tunable
        if scheduled:
            launches += timed(setting, LaunchMode.SWEEP, "sweep", picks, scheduled=True)
        else:
            for config, same in _grouped(picks, lambda pick: pick.trial.config):
                launches += timed(setting, LaunchMode.FORCED, config.key, same)
        unknown = [pick for pick in _once(picks) if must_read_back(pick.trial)]
        launches += _read_backs(round_, setting, unknown, scheduled=scheduled)
        untouched = replace(setting, profile=LaunchProfile())
        # A process without our plugin, in the untouched environment, is the reference already.
        if scheduled or setting.profile.name != DEFAULT_PROFILE:
            sizes = references.setdefault(untouched, [])
            sizes += [pick.trial.size_bytes for pick in picks]
    measured = {s for s, picks in by_setting if not plays_schedules or not s.collective.tunable}
    for setting, sizes in references.items():
        if setting not in measured:
            default = [
                Pick(Trial(setting, size, ABSTAIN), repeat)
                for size in sorted(set(sizes))
                for repeat in range(REFERENCE_REPEATS)
            ]
            launches += timed(setting, LaunchMode.REFERENCE, "reference", default)
    return tuple(launches)


def _read_backs(
    round_: Round, setting: Setting, picks: Sequence[Pick], *, scheduled: bool
) -> list[Launch]:
    if not setting.collective.tunable:
        return []
    if scheduled:
        return _per_chain(round_, setting, LaunchMode.READ_BACK, "read-back", picks, scheduled=True)
    return [
        launch
        for config, same in _grouped(picks, lambda pick: pick.trial.config)
        for launch in _per_chain(
            round_, setting, LaunchMode.READ_BACK, f"read-back:{config.key}", same
        )
    ]


def _per_chain(
    round_: Round,
    setting: Setting,
    mode: LaunchMode,
    name: str,
    picks: Sequence[Pick],
    *,
    scheduled: bool = False,
) -> list[Launch]:
    return [
        Launch(
            f"{round_.number}:{setting.key}:{name}:{chain.sizes[0]}-{chain.sizes[-1]}",
            round_.number,
            setting,
            mode,
            tuple(pick for pick in picks if pick.trial.size_bytes in chain.sizes),
            scheduled,
        )
        for chain in walks(pick.trial.size_bytes for pick in picks)
    ]


def _once(picks: Iterable[Pick]) -> list[Pick]:
    return [Pick(trial) for trial in dict.fromkeys(pick.trial for pick in picks)]


def _grouped(picks: Iterable[Pick], key: Callable[[Pick], _Key]) -> list[tuple[_Key, list[Pick]]]:
    groups: dict[_Key, list[Pick]] = {}
    for pick in picks:
        groups.setdefault(key(pick), []).append(pick)
    return list(groups.items())
