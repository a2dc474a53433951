"""The training loop: updates, validation, checkpoints, save and restore."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dynamiccl.errors import CorruptFile
from dynamiccl.files import replacing
from dynamiccl.train.recipe import Recipe

STATE_VERSION: Final = 8


class Source(ABC):
    """Makes updates: gradient steps on recorded data, or actors that play (`online/`)."""

    #: Their running average is validated and exported.
    members: nn.ModuleList

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics besides those of `update`."""
        return {}

    def start(self, step: int) -> None:  # noqa: B027 - batches need no start
        """Start what plays, after `step` updates."""

    @abstractmethod
    def update(self, step: int) -> dict[str, float]:
        """Make update `step`, from 1 on; metrics, `loss` among them."""

    @abstractmethod
    def state(self) -> dict[str, Any]:
        """Plain values and tensors for `restore`."""

    @abstractmethod
    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from a state."""

    def close(self) -> None:  # noqa: B027 - nor an end
        """Stop what plays."""


class Loop:
    """Updates of a source that was started, stopping after every epoch."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        validate: Callable[[nn.ModuleList], dict[str, float]],
    ) -> None:
        """`validate` gives `validation_regret` (a fraction), of actors `validation_speedup` too."""
        self.step = 0
        self.latest: dict[str, float] = {}
        self.source, self._recipe, self._validate = source, recipe, validate
        #: `step`, averaged `weights`, and their `score`: the less the better.
        self._checkpoints: list[dict[str, Any]] = []
        decay = get_ema_multi_avg_fn(recipe.average_decay)  # type: ignore[no-untyped-call]
        self._averaged = AveragedModel(source.members, multi_avg_fn=decay)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self._recipe.steps

    def run_epoch(self) -> None:
        """Make updates up to the next validation; UserError when an actor died."""
        made: list[dict[str, float]] = []
        end = min(self.step + self._recipe.steps_per_epoch, self._recipe.steps)
        while self.step < end:
            made.append(self.source.update(self.step + 1))
            self.step += 1
            self._averaged.update_parameters(self.source.members)
        values = {name: float(np.mean([each[name] for each in made])) for name in made[0]}
        values |= self._validate(cast(nn.ModuleList, self._averaged.module))
        self.latest = values | self.source.metrics
        # In the second half the learning rate has come down, and actors explore less.
        if self.step * 2 > self._recipe.steps:
            score = -values.get("validation_speedup", -values["validation_regret"])
            state = self._averaged.module.state_dict()
            weights = {name: value.clone() for name, value in state.items()}
            self._checkpoints.append({"step": self.step, "score": score, "weights": weights})

    def best(self) -> dict[str, Any]:
        """The latest checkpoint within the recipe's tolerance of the best, which is partly luck.

        Of actors it is the fastest: cold validation tells little of them.
        """
        plays = "validation_speedup" in self.latest
        tolerance = 0.0 if plays else self._recipe.checkpoint_tolerance
        best = min(each["score"] for each in self._checkpoints)
        return [each for each in self._checkpoints if each["score"] <= best + tolerance][-1]

    def state(self) -> dict[str, Any]:
        """For `restore`."""
        return {
            "step": self.step,
            "latest": self.latest,
            "checkpoints": self._checkpoints,
            "averaged": self._averaged.state_dict(),
            "source": self.source.state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Continue; asynchronous actors do not repeat exactly."""
        self.source.restore(state["source"])
        self._averaged.load_state_dict(state["averaged"])
        self._checkpoints = state["checkpoints"]
        self.latest, self.step = state["latest"], state["step"]


def write_state(path: Path, **state: Any) -> None:
    """Write plain values and tensors."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # torch's own writer ends the process on a full disk (torch 2.13).
    with replacing(path, is_synced=True) as hidden, hidden.open("wb") as file:
        torch.save({"version": STATE_VERSION, **state}, file)


def read_state(path: Path) -> dict[str, Any]:
    """What `write_state` wrote; raises CorruptFile."""
    try:
        # weights_only: the file can hold no code.
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptFile(f"{path} is not the state of a training run: {error}") from error
    if state.get("version") != STATE_VERSION:
        raise CorruptFile(
            f"{path} has version {state.get('version')}, this release reads {STATE_VERSION}; "
            "finish the run with the release that began it, or train anew"
        )
    return state
