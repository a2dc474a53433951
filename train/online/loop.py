"""The training loop of recipes with actors (A3C, IMPALA), with save and restore.

Counts updates, averages the weights as other recipes do, validates after every epoch, and saves the
state for a resume. Corresponds to `train/loop.py` for recipes that train on data.
"""

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from dynamiccl.train.heads import Imitator, Member
from dynamiccl.train.loop import STATE_VERSION, Checkpoint, write_state
from dynamiccl.train.online.actor import Update
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.recipe import Recipe


class Updates(Protocol):
    """A source of updates of the network."""

    network: ActorCritic
    #: The optimizer's statistic, one tensor for each parameter.
    squares: list[torch.Tensor]

    @property
    def metrics(self) -> dict[str, float]:
        """Further metrics of an epoch."""

    def start(self, step: int) -> None:
        """Start after `step` updates."""

    def next(self) -> Update:
        """Wait for the next update, which the network has then."""

    def close(self) -> None:
        """Stop what was started."""


class OnlineLoop:
    """Counts updates and validates; stops after every epoch, where it can be saved."""

    def __init__(
        self,
        updates: Updates,
        recipe: Recipe,
        validate: Callable[[Iterable[Member]], float],
        pilot: Callable[[Imitator], tuple[float, int]],
    ) -> None:
        """`validate` returns the mean regret of a list of networks.

        `pilot` gives an actor the best `probe_every`, and returns its speedup and that.
        """
        self.step = 0
        #: Values at the end of each epoch: `steps`, `losses`, `regrets`, and of the actors' jobs
        #: `speedups` (time of NCCL's own choice over theirs), all calls that were played, and
        #: seconds; `validation_speedups` are of the averaged actor's most likely actions, with the
        #: best `probe_every` of the recipe (`probes`).
        self.curves: dict[str, list[Any]] = {
            name: []
            for name in (
                *("steps", "losses", "regrets", "speedups", "validation_speedups"),
                *("probes", "calls", "seconds"),
            )
        }
        self.updates, self._recipe, self._validate = updates, recipe, validate
        self._pilot = pilot
        #: Of the epochs in the second half of the run, the one with the largest speedup.
        self._best: Checkpoint | None = None
        self._online = nn.ModuleList([updates.network.actor])
        decay = get_ema_multi_avg_fn(recipe.average_decay)  # type: ignore[no-untyped-call]
        self._averaged = AveragedModel(self._online, multi_avg_fn=decay)
        self._is_started = False

    @property
    def is_over(self) -> bool:
        """Whether all updates are done."""
        return self.step >= self._recipe.steps

    @property
    def latest(self) -> dict[str, float]:
        """Metrics of the latest epoch."""
        last = {name: values[-1] for name, values in self.curves.items()}
        return {
            "loss": last["losses"],
            "validation_regret": last["regrets"],
            "speedup": last["speedups"],
            "validation_speedup": last["validation_speedups"],
            "probe_every": last["probes"],
            "simulated_calls": last["calls"],
            "train_wall_s": last["seconds"],
            **self.updates.metrics,
        }

    def run_epoch(self) -> None:
        """Wait for the updates up to the next validation, and validate.

        The actors go on meanwhile. Raises UserError when one of them died.
        """
        began = time.monotonic()
        if not self._is_started:
            self.updates.start(self.step)
            self._is_started = True
        seen: list[Update] = []
        end = min(self.step + self._recipe.steps_per_epoch, self._recipe.steps)
        while self.step < end:
            seen.append(self.updates.next())
            self.step += 1
            self._averaged.update_parameters(self._online)
        self._note(seen, began)
        if self.is_over:
            self.close()

    def _note(self, seen: list[Update], began: float) -> None:
        calls, seconds = (self.curves[name][-1:] or [0] for name in ("calls", "seconds"))
        regret = self._validate(cast(Iterable[Member], self._averaged.module))
        (actor,) = cast(Iterable[Imitator], self._averaged.module)
        speedup, probe_every = self._pilot(actor)
        values = {
            "steps": self.step,
            "losses": float(np.mean([each.loss for each in seen])),
            "regrets": regret,
            "speedups": float(np.mean([each.speedup for each in seen])),
            "validation_speedups": speedup,
            "probes": probe_every,
            "calls": calls[0] + sum(each.calls for each in seen),
            "seconds": seconds[0] + time.monotonic() - began,
        }
        for name, value in values.items():
            self.curves[name].append(value)
        late = self.curves["validation_speedups"][self._num_early :]
        if late and late[-1] == max(late):
            state = self._averaged.module.state_dict()
            weights = {name: value.clone() for name, value in state.items()}
            self._best = Checkpoint(self.step, regret, weights)

    @property
    def _num_early(self) -> int:
        """Epochs that end in the first half of the run, whose policies still explore."""
        return self._recipe.steps // 2 // self._recipe.steps_per_epoch

    def best(self) -> Checkpoint:
        """The checkpoint of the run's second half with the largest validation speedup.

        Cold validation tells little here, and the last policy may be worse than one before it.
        """
        assert self._best is not None
        return self._best

    def save(self, path: Path, **facts: Any) -> None:
        """Write the state for `restore`; the actors go on meanwhile."""
        state = {
            "version": STATE_VERSION,
            "step": self.step,
            "curves": self.curves,
            "network": self.updates.network.state_dict(),
            "averaged": self._averaged.state_dict(),
            "squares": self.updates.squares,
            "best": None if self._best is None else asdict(self._best),
            "facts": facts,
        }
        write_state(path, state)

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved state; asynchronous actors do not repeat exactly."""
        self.updates.network.load_state_dict(state["network"])
        self._averaged.load_state_dict(state["averaged"])
        for own, kept in zip(self.updates.squares, state["squares"], strict=True):
            own.copy_(kept)
        self.step, self.curves = state["step"], state["curves"]
        self._best = None if state["best"] is None else Checkpoint(**state["best"])

    def close(self) -> None:
        """Stop the actors."""
        self.updates.close()
