"""Actor processes on this machine, which put trajectories or updates into a queue."""

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

#: Seconds between checks that the actors are alive while waiting.
_PATIENCE_S: Final = 5.0

CONTEXT: Final = multiprocessing.get_context("spawn")


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """The parameters of one actor: its world, its recipe, its seed."""

    place: str
    tables: Tables
    world: World
    trigger: str
    recipe: Recipe
    seed: int

    def env(self) -> DecisionEnv:
        """The environment of this actor."""
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
        """The player in this actor's environment."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        return Player(self.env(), state_units, self.recipe, self.seed)


class ActorProcesses:
    """One process for each order, which runs `play(order, put, is_over, *given)`."""

    def __init__(
        self, orders: Sequence[ActorSettings], play: Callable[..., None], room: int = 0
    ) -> None:
        """Start no process yet; `room`: capacity of the queue, 0 = unbounded."""
        self._orders, self._play = orders, play
        self._made: Any = CONTEXT.Queue(room)
        self._processes: list[Any] = []

    def start(self, *given: Callable[[], Any]) -> None:
        """Start all processes; the functions make the arguments of each."""
        for order in self._orders:
            made = [make() for make in given]
            arguments = (self._play, os.getpid(), order, self._made, *made)
            process = CONTEXT.Process(target=_run, args=arguments, daemon=True)
            process.start()
            self._processes.append(process)

    def get(self) -> Any:
        """The next item from any actor. Raises UserError when an actor died.

        The others may still run, but the dead one's world would be missing from the training.
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
        """Stop them."""
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes = []


def _run(
    play: Callable[..., None], parent: int, order: ActorSettings, made: Any, *given: Any
) -> None:
    """The main function of an actor process: runs until done, or its parent is gone."""
    play(order, made, lambda: os.getppid() != parent, *given)
    made.close()
    made.join_thread()
