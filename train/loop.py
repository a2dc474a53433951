"""The training loop of a run (gradient steps, validation), with save and restore."""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dynamiccl.errors import CorruptFile
from dynamiccl.train.algorithms import members_of, set_entropy_weight
from dynamiccl.train.heads import Member
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.replay import CostDropout, Mixed, Replay

#: Version of the state format.
STATE_VERSION: Final = 4


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Averaged weights, and their mean regret on the validation bins."""

    step: int
    regret: float
    weights: dict[str, Any]


class Loop:
    """Trains an algorithm; stops after every epoch, where it can be saved."""

    def __init__(
        self,
        algorithm: Any,
        replay: Replay | Mixed | CostDropout,
        recipe: Recipe,
        validate: Callable[[Iterable[Member]], float],
    ) -> None:
        """`validate` returns the mean regret of a list of networks."""
        self.step = 0
        #: Values at the end of each epoch, fractions: `steps`, `losses`, `regrets`.
        self.curves: dict[str, list[Any]] = {"steps": [], "losses": [], "regrets": []}
        self._checkpoints: list[Checkpoint] = []
        self._algorithm = algorithm
        self._replay = replay
        self._recipe = recipe
        self._validate = validate
        self._online = members_of(algorithm)
        decay = get_ema_multi_avg_fn(recipe.average_decay)  # type: ignore[no-untyped-call]
        self._averaged = AveragedModel(self._online, multi_avg_fn=decay)

    @property
    def is_over(self) -> bool:
        """Whether all steps are done."""
        return self.step >= self._recipe.steps

    @property
    def latest(self) -> dict[str, float]:
        """Metrics of the latest epoch."""
        return {"loss": self.curves["losses"][-1], "validation_regret": self.curves["regrets"][-1]}

    def run_epoch(self) -> None:
        """Run the steps up to the next validation, and validate."""
        recipe, losses = self._recipe, []
        end = min(self.step + recipe.steps_per_epoch, recipe.steps)
        while self.step < end:
            self.step += 1
            set_entropy_weight(self._algorithm, recipe.entropy_weight(self.step))
            losses.append(float(self._algorithm.update(self._replay.sample())["loss"]))
            self._averaged.update_parameters(self._online)
        regret = self._validate(cast(Iterable[Member], self._averaged.module))
        for name, value in zip(
            self.curves, (self.step, float(np.mean(losses)), regret), strict=True
        ):
            self.curves[name].append(value)
        if self.step * 2 > recipe.steps:
            state = self._averaged.module.state_dict()
            weights = {name: value.clone() for name, value in state.items()}
            self._checkpoints.append(Checkpoint(self.step, regret, weights))

    def best(self) -> Checkpoint:
        """The checkpoint to export."""
        return _choose(self._checkpoints, self._recipe.checkpoint_tolerance)

    def close(self) -> None:
        """Do nothing; loops with actors stop them here."""

    def save(self, path: Path, **facts: Any) -> None:
        """Write the complete state, and `facts` (plain values)."""
        modules = self._algorithm.impl._checkpointer.modules
        state = {
            "version": STATE_VERSION,
            "step": self.step,
            "curves": self.curves,
            "checkpoints": [asdict(checkpoint) for checkpoint in self._checkpoints],
            "modules": {name: module.state_dict() for name, module in modules.items()},
            "averaged": self._averaged.state_dict(),
            "grad_step": self._algorithm._grad_step,
            "replay_random": self._replay.random.bit_generator.state,
            "torch_random": torch.get_rng_state(),
            "facts": facts,
        }
        write_state(path, state)

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state of `read_state`."""
        for name, module in self._algorithm.impl._checkpointer.modules.items():
            module.load_state_dict(state["modules"][name])
        self._averaged.load_state_dict(state["averaged"])
        self._algorithm._grad_step = state["grad_step"]
        self._replay.random.bit_generator.state = state["replay_random"]
        torch.set_rng_state(state["torch_random"])
        self._checkpoints = [Checkpoint(**checkpoint) for checkpoint in state["checkpoints"]]
        self.curves, self.step = state["curves"], state["step"]


def write_state(path: Path, state: dict[str, Any]) -> None:
    """Write a state atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    with part.open("wb") as file:
        torch.save(state, file)
        file.flush()
        os.fsync(file.fileno())
    part.replace(path)


def read_state(path: Path) -> dict[str, Any]:
    """A state written by `Loop.save`; raises CorruptFile."""
    try:
        # weights_only: the file can hold tensors and plain values, but no code.
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CorruptFile(f"{path} is not the state of a training run: {error}") from error
    if state.get("version") != STATE_VERSION:
        raise CorruptFile(
            f"{path} has version {state.get('version')}, this release reads {STATE_VERSION}; "
            "finish the run with the release that began it, or train anew"
        )
    return state


def _choose(checkpoints: Sequence[Checkpoint], tolerance: float) -> Checkpoint:
    """The latest checkpoint with a validation regret within `tolerance` of the best.

    There are few validation tasks, so the very best is partly luck; later weights are better
    trained. Only those of the second half are here, when the learning rate has come down.
    """
    best = min(checkpoint.regret for checkpoint in checkpoints)
    good = [c for c in checkpoints if c.regret <= best + tolerance]
    return good[-1]
