"""The config for each kind of call, and its gain: table, policy, best.

*Table*: the best measured config of each kind. Its gain is cross-fitted: the config is chosen on
all runs but one and its gain taken from that one, in turn, so that luck in choosing does not count.
*Best* is the same choice with the gain that it was chosen by: what no table exceeds, and too good.
A *policy* is asked as for a decision table: cold, within what its own manifest lets it choose.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.manifest import Support
from dynamiccl.datasets.questions import cold_questions, decide, table_supports
from dynamiccl.errors import UnknownName
from dynamiccl.evaluate.forecast.between import MIN_RUNS
from dynamiccl.evaluate.forecast.gains import Gains
from dynamiccl.evaluate.forecast.job import Kind
from dynamiccl.nccl import ABSTAIN, Collective, Config

if TYPE_CHECKING:
    from dynamiccl.train.policy import TorchPolicy

Floats = npt.NDArray[np.float64]
#: Standard deviation of log(model / machine) of a config's time against another's. Fitted models of
#: H100 nodes miss AllReduce by 10 to 20 % below 64 MB and by 4 to 8 % above
#: (meta-pytorch/autoparallel, pull request 425); two configs share a part of it.
_MODEL_ERROR: Final = 0.10
#: So many standard deviations of a mean apart, a choice is sure.
_CLOSE: Final = 3.0
_NOTHING: Final = np.zeros(1)


@dataclass(frozen=True, slots=True)
class Pick:
    """A config for one kind, and its gain: log(NCCL's own choice / config)."""

    config: Config
    #: (R,) of each run; of a model the one value that it says.
    logs: Floats
    #: Runs that the values are of; kinds with the same runs share what a run has in common.
    runs: tuple[str, ...]
    #: The sizes that it rests on.
    sizes: tuple[int, ...]
    #: Standard deviation of what the distance to a measured size adds, and of a model's own error.
    blur: float
    model_error: float
    #: Standard deviation of a gain between runs as usual for the collective and shape.
    usual: float
    #: Whether other runs might well have chosen another config.
    is_close: bool

    @property
    def mean(self) -> float:
        """The mean gain over runs."""
        return float(np.mean(self.logs))


Choose = Callable[[Kind, Gains], Pick | str]


def table(_kind: Kind, gains: Gains) -> Pick | str:
    """The best measured config, with its cross-fitted gain; a model's best as it is."""
    chosen = best_action(gains)
    if not gains.runs:
        return _pick(gains, chosen, gains.logs[chosen])
    return replace(_pick(gains, chosen, _cross_fitted(gains)), is_close=_is_close(gains))


def best(_kind: Kind, gains: Gains) -> Pick | str:
    """The best measured config, with its selection-biased gain."""
    chosen = best_action(gains)
    return _pick(gains, chosen, gains.logs[chosen])


def best_action(gains: Gains) -> int:
    """The action with the largest mean gain."""
    return int(np.argmax(gains.means))


def policy_choice(policy: "TorchPolicy", system: str) -> Choose:
    """A function: the config in a policy's table on a system, with its measured gain."""
    manifest = policy.manifest
    supports = table_supports(manifest)
    configs = manifest.actions().configs

    def choose(kind: Kind, gains: Gains) -> Pick | str:
        support = _support(supports, kind, system)
        if support is None:
            # The plugin has no table there, and leaves the choice to NCCL.
            return _pick(gains, ABSTAIN_ACTION, gains.logs[ABSTAIN_ACTION])
        collective = Collective.parse(kind.collective)
        asked = cold_questions(manifest, support, [collective], [kind.bin])
        observations = Observations.cold(asked.context)
        wanted = configs[int(decide(policy, observations, asked.mask, asked.rule)[0])]
        if wanted not in gains.configs:
            return f"the policy wants {wanted.key}, which was not measured"
        action = gains.configs.index(wanted)
        if not np.isfinite(gains.means[action]):
            return f"the policy wants {wanted.key}, which was not measured in {MIN_RUNS} runs"
        return _pick(gains, action, gains.logs[action])

    return choose


def _support(supports: Sequence[Support], kind: Kind, system: str) -> Support | None:
    same = [s for s in supports if (s.num_nodes, s.num_ranks) == (kind.num_nodes, kind.num_ranks)]
    named = [s for s in same if s.system == system]
    if not named and len(same) > 1:
        names = [s.system for s in same]
        raise UnknownName("system", system, names, where="the policy; name one with --system")
    return next(iter([*named, *same]), None)


def _pick(gains: Gains, action: int, logs: Floats) -> Pick:
    kept = logs[~np.isnan(logs)]
    config = gains.configs[action]
    acts = config != ABSTAIN
    runs = tuple(run for run, log in zip(gains.runs, logs, strict=False) if not np.isnan(log))
    return Pick(
        config,
        kept if len(kept) else _NOTHING,
        runs,
        gains.sizes,
        float(gains.blur[action]),
        _MODEL_ERROR if acts and not gains.runs else 0.0,
        gains.usual if acts else 0.0,
        is_close=False,
    )


def _is_close(gains: Gains) -> bool:
    """Whether the two best differ by less than noise."""
    first, second = np.sort(gains.means)[::-1][:2] if len(gains.means) > 1 else (0.0, -np.inf)
    return bool(first - second < _CLOSE * gains.usual / np.sqrt(len(gains.runs)))


def _cross_fitted(gains: Gains) -> Floats:
    """(R,) gain in each run of the config that was best in the other runs."""
    found = np.empty(len(gains.runs))
    for run in range(len(gains.runs)):
        others = np.delete(gains.logs, run, axis=1)
        count = np.sum(~np.isnan(others), axis=1)
        means = np.nansum(others, axis=1) / np.maximum(count, 1)
        able = (count >= MIN_RUNS - 1) & ~np.isnan(gains.logs[:, run])
        chosen = int(np.argmax(np.where(able, means, -np.inf)))
        found[run] = gains.logs[chosen, run]
    return found
