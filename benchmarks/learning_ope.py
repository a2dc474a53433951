"""Off-policy estimates against the truth, on logs from a simulated grid.

The world: the tasks of a sweep without noise, and 40 samples of every cell, log-normal around its
time with a standard deviation of 5 %. Logs: 40,000 rows of a behaviour that leaves half of its
calls to NCCL and spreads the rest over all configs alike.

*Spearman*: of 45 policies between the oracle and 50 % regret (oracle, trained policy, tables,
boosted trees and the default, mixed with random ones), true against estimated value, for each of 20
logs. *Coverage*: how often the 90 % interval holds the truth, over 200 further logs and three
fixed policies. *Error*: root of the mean square, in units of the default's time.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from learning_grids import NO_NOISE, SHAPES, sweep
from scipy import stats

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import TaskGrid, task_grid, tuned, usable
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.baselines import make_policies
from dynamiccl.evaluate.ope import Estimate, Float64Array, Log, deterministic, every_estimate
from dynamiccl.train.policy import TorchPolicy
from tests.evaluate.grids import noisy

ROWS: Final = 40_000
SPREAD: Final = 0.05
NUM_POLICIES: Final = 45
WORST_REGRET: Final = 0.5
CONFIDENCE: Final = 0.9
LOGS_FOR_RANKS: Final = 20
LOGS_FOR_COVERAGE: Final = 200


def ope_figures(out: Path, policy: Path) -> dict[str, Any]:
    """Spearman, coverage and error of the estimators."""
    truth = sweep(out / "ope-truth", "truth", cycles=1, seed=2000, noise=NO_NOISE, shapes=SHAPES)
    frame = tuned(read(truth))
    catalogue = Catalogue.from_frame(usable(frame))
    parts = [task_grid(frame, catalogue, [s]) for s in (Split.TRAIN, Split.VALIDATION, Split.TEST)]
    world = noisy(parts[2], SPREAD, np.random.default_rng(0))
    players = make_policies(parts[0], parts[1], catalogue, [("trained", TorchPolicy.load(policy))])
    chosen = {player.name: player.choose(world) for player in players}
    bases = [deterministic(actions, len(catalogue)) for actions in chosen.values()]
    policies = _spread_out(world, bases)
    behaviour = mixture(deterministic(chosen["nccl-default"], len(catalogue)), world.mask, 0.5)
    figures = _ranks(world, behaviour, policies)
    fixed = [policies[0], policies[NUM_POLICIES // 2], bases[0]]
    return figures | _coverage(world, behaviour, fixed) | {"ope_rows": ROWS}


def _spread_out(world: TaskGrid, bases: list[Float64Array]) -> list[Float64Array]:
    """Policies whose regret, against the oracle's value, is spread evenly up to WORST_REGRET."""
    best = max(true_value(world, base) for base in bases)
    random = mixture(bases[0], world.mask, 1.0)
    policies = []
    for index, wanted in enumerate(np.linspace(0.0, WORST_REGRET, NUM_POLICIES)):
        base = bases[index % len(bases)]
        own, worst = (true_value(world, each) / best - 1.0 for each in (base, random))
        share = np.clip((wanted - own) / (worst - own), 0.0, 1.0)
        policies.append(mixture(base, world.mask, float(share)))
    return policies


def _estimates(
    world: TaskGrid, behaviour: Float64Array, policies: list[Float64Array], seed: int
) -> list[dict[str, Estimate]]:
    log = draw_log(world, behaviour, ROWS, np.random.default_rng(seed))
    return every_estimate(log, policies, behaviour, CONFIDENCE)


def _ranks(
    world: TaskGrid, behaviour: Float64Array, policies: list[Float64Array]
) -> dict[str, float]:
    truths = np.array([true_value(world, policy) for policy in policies])
    found: dict[str, list[float]] = {}
    errors: dict[str, list[float]] = {}
    for seed in range(LOGS_FOR_RANKS):
        estimates = _estimates(world, behaviour, policies, seed)
        for name in estimates[0]:
            values = -np.array([each[name]["mean"] for each in estimates], dtype=np.float64)
            found.setdefault(name, []).append(float(stats.spearmanr(truths, values).statistic))
            errors.setdefault(name, []).append(float(((values - truths) ** 2).mean()))
    figures = {"ope_policies": float(len(policies))}
    for name, ranks in found.items():
        key = "ope_spearman" if name == "DR" else f"ope_spearman_{name.lower()}"
        low, high = np.quantile(ranks, [0.025, 0.975])
        figures |= {key: float(np.mean(ranks)), f"{key}_lo": float(low), f"{key}_hi": float(high)}
        figures[f"ope_error_{name.lower()}"] = float(np.sqrt(np.mean(errors[name])))
    return figures


def _coverage(
    world: TaskGrid, behaviour: Float64Array, policies: list[Float64Array]
) -> dict[str, float]:
    truths = [true_value(world, policy) for policy in policies]
    held = {"SNIPS": 0, "DR": 0}
    for seed in range(LOGS_FOR_COVERAGE):
        estimates = _estimates(world, behaviour, policies, 10_000 + seed)
        for truth, by_name in zip(truths, estimates, strict=True):
            for name in held:
                low, high = by_name[name]["low"], by_name[name]["high"]
                if low is None or high is None:
                    raise RuntimeError(f"{name}: {by_name[name]['note']}")
                held[name] += low <= -truth <= high
    total = LOGS_FOR_COVERAGE * len(policies)
    return {f"ope_coverage_{name.lower()}": count / total for name, count in held.items()}


def draw_log(
    grid: TaskGrid, behaviour: Float64Array, size: int, random: np.random.Generator
) -> Log:
    """Calls of tasks drawn alike, by a known stochastic policy (T, A), timed as in the samples.

    Raises ValueError when the behaviour takes what was not measured.
    """
    if (behaviour[~grid.mask] > 0).any():
        raise ValueError("the behaviour takes actions that were not measured")
    task = random.integers(0, len(behaviour), size)
    cumulative = behaviour.cumsum(axis=1)
    drawn = random.random(size)[:, None] * cumulative[task, -1:]
    action = (cumulative[task] <= drawn).sum(axis=1)
    which = random.random(size)
    cells = [grid.samples[cell] for cell in zip(task.tolist(), action.tolist(), strict=True)]
    times = np.array([each[int(at * len(each))] for at, each in zip(which, cells, strict=True)])
    reward = -times / grid.default_us[task]
    return Log(task, action, reward, behaviour[task, action])


def mixture(policy: Float64Array, mask: npt.NDArray[np.bool_], epsilon: float) -> Float64Array:
    """(T, A) a policy that is random, among what `mask` allows, with probability `epsilon`."""
    uniform = mask / mask.sum(axis=1, keepdims=True)
    mixed: Float64Array = (1.0 - epsilon) * policy + epsilon * uniform
    return mixed


def true_value(grid: TaskGrid, policy: Float64Array) -> float:
    """Mean reward of a policy (T, A) over the tasks, by the grid's own times."""
    rewards = np.where(grid.mask, -grid.times_us / grid.default_us[:, None], 0.0)
    return float((policy * rewards).sum(axis=1).mean())
