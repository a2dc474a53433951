"""Actors as processes of this machine: they play and put what they made into one queue."""

import contextlib
import os
import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
from torch import multiprocessing

from dynamiccl.errors import UserError
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import Tables
from dynamiccl.train.online.decisions import DecisionEnv, Rounds
from dynamiccl.train.online.player import Player
from dynamiccl.train.online.variation import Variation
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.trigger.detector import Detector

#: How long to wait for something before looking whether the actors live.
_PATIENCE_S: Final = 5.0

CONTEXT: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class Order:
    """What an actor is given."""

    place: str
    tables: Tables
    world: World
    trigger: str
    recipe: Recipe
    seed: int

    def env(self) -> DecisionEnv:
        """The actor's own world."""
        rounds = Rounds.of(
            self.world,
            episode_rounds=self.recipe.episode_rounds,
            seen_decisions=self.recipe.seen_decisions,
        )
        watch = partial(Detector.load, Path(self.trigger)) if self.trigger else None
        variation = Variation(self.recipe.vary, self.recipe.vary_times)
        jobs = self.recipe.jobs
        return DecisionEnv(self.world, self.tables, jobs, rounds, watch, variation)

    def player(self, state_units: int) -> Player:
        """Who plays in it."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        return Player(self.env(), state_units, self.recipe, self.seed)


class ActorProcesses:
    """One process an order; `play(order, put, is_over, *given)` is what each does."""

    def __init__(self, orders: Sequence[Order], play: Callable[..., None], room: int = 0) -> None:
        """Start none yet; `room`: how many things the queue holds, 0 = any number."""
        self._orders, self._play = orders, play
        self._made: Any = CONTEXT.Queue(room)
        self._processes: list[Any] = []

    def start(self, *given: Callable[[], Any]) -> None:
        """Start all; each is given what the functions make for it."""
        for order in self._orders:
            made = [make() for make in given]
            arguments = (self._play, os.getpid(), order, self._made, *made)
            process = CONTEXT.Process(target=_run, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)

    def get(self) -> Any:
        """The next thing that one of them made. Raises UserError when one of them died.

        Others may play on, but its place would be missing from what is learned.
        """
        while True:
            dead = [p for p in self._processes if not p.is_alive() and p.exitcode]
            if dead:
                place = self._orders[self._processes.index(dead[0])].place
                self.close()
                raise UserError(
                    f"the actor in '{place}' ended with {dead[0].exitcode}; what it said "
                    "stands above, and the run goes on with --resume"
                )
            with contextlib.suppress(queue.Empty):
                return self._made.get(timeout=_PATIENCE_S)

    def close(self) -> None:
        """End them."""
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes = []


def _run(play: Callable[..., None], parent: int, order: Order, made: Any, *given: Any) -> None:
    """An actor's process, until it has done, or who started it is gone."""
    play(order, made, lambda: os.getppid() != parent, *given)
    made.close()
    made.join_thread()
