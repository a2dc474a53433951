"""Fits a Gaussian process to a data set."""

from collections.abc import Sequence
from dataclasses import dataclass

from dynamiccl.train.cautious.fit import Fitted, fit_cautious
from dynamiccl.train.cautious.tasks import Rows, Tasks
from dynamiccl.train.data import TrainingData
from dynamiccl.train.gaussian.kernel import Kernel
from dynamiccl.train.gaussian.posterior import Posterior, fit_kernel


@dataclass(frozen=True, slots=True)
class _Process:
    """The learner: rows of a machine share a kernel; each collective has its own posterior."""

    seed: int

    def settings(self, collectives: Sequence[Rows]) -> Sequence[Kernel]:
        return [fit_kernel(list(collectives), seed=self.seed)]

    def model(self, setting: Kernel, rows: Rows) -> Posterior:
        return Posterior(setting, rows)

    def noise(self, setting: Kernel) -> float:
        return float(setting.noise())


def fit_gaussian(data: TrainingData, *, alpha: float, seed: int) -> Fitted:
    """Fit to the training and validation bins, and calibrate; see `fit_cautious`."""
    return fit_cautious(Tasks.of(data), _Process(seed), alpha=alpha)
