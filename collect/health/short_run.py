"""The sweep that pairs up the GPUs of a cluster: NCCL's default, one size, many repeats."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from dynamiccl.collect.health.pairings import pairings
from dynamiccl.collect.strategies.strategy import Outcome
from dynamiccl.collect.sweep.group_shape import GroupShape
from dynamiccl.collect.sweep.load import Sweep, parse_sweep
from dynamiccl.collect.sweep.settings import Sizes, SweepFile, SweepLauncher
from dynamiccl.collect.sweep.text import sweep_text
from dynamiccl.collect.sweep.trial import Trial
from dynamiccl.nccl import Collective

#: Rows of a launch (`-N`): their lower median stands even where four are slow by chance.
REPEATS: Final = 9
_ITERATIONS: Final = 20


@dataclass(frozen=True, slots=True)
class Cluster:
    """The nodes and GPUs to check."""

    num_nodes: int
    gpus: int
    size_bytes: int


def short_sweep(cluster: Cluster, base: SweepFile, name: str, *, again: int = 0) -> Sweep:
    """The sweep of a cluster; launcher, runner and simulator are those of `base`.

    `again` counts how often the cluster was measured before: the simulator has other noise then.

    AllReduce, whose two ranks load both directions of what is between them, and each GPU's
    reduction. Raises UserError and InvalidSweep.
    """
    groups = tuple(
        GroupShape(
            num_nodes=cluster.num_nodes,
            ranks_per_node=cluster.gpus,
            split=pairing.split.text,
            spare=pairing.spare,
        )
        for pairing in pairings(cluster.num_nodes, cluster.gpus)
    )
    runner = {"mode": "processes", "read_back": False, "per_iteration": True}
    file = SweepFile(
        name=name,
        system=base.system,
        collectives=(Collective.AllReduce.wire,),
        groups=groups,
        sizes=Sizes(list=(cluster.size_bytes,)),
        algorithms=(),
        cycles=1,
        iterations=_ITERATIONS,
        small_iterations=_ITERATIONS,
        runner=base.runner.model_copy(update=runner),
        launcher=base.launcher,
        telemetry=base.telemetry,
        simulator=base.simulator.model_copy(update={"seed": base.simulator.seed + again}),
    )
    return parse_sweep(sweep_text(file), where=name)


def usual_settings(launcher: str) -> SweepFile:
    """The settings of a short run without a sweep file: a launcher, and defaults."""
    group = GroupShape(num_nodes=1, ranks_per_node=2)
    return SweepFile(
        name="health",
        system="health",
        collectives=(Collective.AllReduce.wire,),
        groups=(group,),
        sizes=Sizes(list=(1 << 20,)),
        launcher=SweepLauncher(kind=launcher),
    )


class Repeated:
    """A strategy that measures every trial so many times in one round."""

    def __init__(self, trials: Sequence[Trial]) -> None:
        """Take the sweep's trials."""
        self._picks = tuple(
            replace(trial, repeat=repeat) for trial in trials for repeat in range(REPEATS)
        )

    def next_picks(
        self,
        number: int,
        history: Sequence[Outcome],  # noqa: ARG002 - what is measured does not depend on it
    ) -> tuple[Trial, ...] | None:
        """All picks in round 0, None after it."""
        return self._picks if number == 0 else None

    def expected_picks(self) -> int:
        """The exact number."""
        return len(self._picks)
