"""`dynamiccl-evaluate simulate`: from policies and a setting to a page."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from dynamiccl.evaluate.simulate.compare import Comparison, conclude, play
from dynamiccl.evaluate.simulate.lineup import (
    MakeWatch,
    Setting,
    policy_contenders,
    simple_contenders,
)
from dynamiccl.evaluate.simulate.page import write_simulation
from dynamiccl.simulator.record_jobs import check_workload
from dynamiccl.train.commands.options import open_bar
from dynamiccl.train.environment import delay_calls
from dynamiccl.train.policy import TorchPolicy


def simulate(
    setting: Setting,
    policies: Mapping[str, Path],
    trigger: Path | None,
    seeds: Sequence[int],
    out: Path,
) -> Comparison:
    """Simulate all rows and write the page; `policies` are directories by name.

    Raises UserError for a system that cannot run the workload, and as `TorchPolicy.load`.
    """
    check_workload(setting.system, setting.workload)
    contenders = simple_contenders(setting)
    make_watch = None if trigger is None else _watch(trigger)
    for name, folder in policies.items():
        policy = TorchPolicy.load(folder)
        contenders += policy_contenders(setting, name, policy, None)
        if make_watch is not None:
            contenders += policy_contenders(setting, name, policy, make_watch)
    ours = frozenset(each.name for each in contenders if any(n in each.name for n in policies))
    with open_bar() as progress:
        total = len(contenders) * len(seeds) * setting.calls
        bar = progress.add_task("calls", total=total)
        played = play(setting, contenders, seeds, lambda count: progress.advance(bar, count))
    found = conclude(setting, played)
    write_simulation(found, ours, delay_calls(contenders[0].world), out)
    return found


def _watch(trigger: Path) -> MakeWatch:
    from dynamiccl.train.trigger.detector import Detector

    return lambda: Detector.load(trigger)
