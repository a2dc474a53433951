"""Actors: where one plays, how it plays N jobs with a network, and the processes that do.

N jobs, K task keys, R = N x K rows (a row is a task key of a job), T rounds of a trajectory.
"""

import contextlib
import os
import pickle
import queue
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import polars as pl
import torch
from torch import multiprocessing, nn

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.splits import Split, with_split
from dynamiccl.errors import UserError
from dynamiccl.simulator.group import Group
from dynamiccl.simulator.record_jobs import check_workload
from dynamiccl.simulator.scenario import Scenario, find_scenario
from dynamiccl.simulator.systems import System, find_system
from dynamiccl.simulator.workloads import Workload, make_workload
from dynamiccl.simulator.world import World
from dynamiccl.train.environment import DecisionEnv, Rounds, Tables, Variation
from dynamiccl.train.loop import Source
from dynamiccl.train.online.actor_critic import ActorCritic, RoundObservations, State
from dynamiccl.train.recipe import Recipe
from dynamiccl.train.trigger import Detector


@dataclass(frozen=True, slots=True)
class Place:
    """A simulated system, its workload and its interference scenario, from a text.

    b300-nvlink:decode+lora:busy-host            the largest group of the system
    h100-ib:decode:congested:4x8                 4 nodes of 8 ranks
    """

    text: str
    system: System
    workload: Workload
    scenario: Scenario

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse the text. Raises UserError for another form, and as the look-ups of its parts."""
        parts = text.split(":")
        shape = re.fullmatch(r"(\d+)x(\d+)", parts[3]) if len(parts) == 4 else None
        if len(parts) not in {3, 4} or (len(parts) == 4 and shape is None):
            raise UserError(
                f"'{text}' is no place to train in; give SYSTEM:WORKLOAD+WORKLOAD:SCENARIO, and "
                "the group's shape behind it where it is not the largest, as h100-ib:ddp:quiet:4x8"
            )
        system = find_system(parts[0])
        group = Group(int(shape[1]), int(shape[2])) if shape else system.groups()[-1]
        workload = make_workload(parts[1].split("+"), group)
        check_workload(system, workload)
        return cls(text, system, workload, find_scenario(parts[2]))

    @property
    def for_training(self) -> Workload:
        """The workload with sizes of training octaves only, so that test sizes stay unseen."""
        calls = self.workload.calls
        moved = (replace(call, size_bytes=training_size(call.size_bytes)) for call in calls)
        return Workload(self.workload.name, tuple(moved))


@cache
def training_size(size_bytes: int) -> int:
    """The size, or the next one by octaves above it that is in a training octave.

    >>> training_size(1 << 20), training_size(1 << 19)
    (1048576, 1048576)
    """
    sizes = pl.DataFrame({"size_bytes": [size_bytes << up for up in range(5)]})
    for row in with_split(sizes).iter_rows(named=True):
        if row["split"] == Split.TRAIN:
            return int(row["size_bytes"])
    raise UserError(
        f"{size_bytes} bytes lie in no octave that is split; give sizes of 64 B or more"
    )


@dataclass(frozen=True, slots=True)
class Trajectory:
    """T rounds, and the observation after them."""

    seen: RoundObservations  # (T + 1, R, ...)
    #: LSTM state of the jobs before the first round.
    state: State
    action: torch.Tensor  # (T, R)
    #: Log probability of each action, under the weights that were used.
    log_probability: torch.Tensor  # (T, R)
    #: Whether the player asked NCCL's own choice for its news, whatever the network wanted.
    is_probe: torch.Tensor  # (T, R)
    reward: torch.Tensor  # (T, R)
    #: Calls of a key in a round; rows without calls are not trained on.
    calls: torch.Tensor  # (T, R)
    #: Time of all calls of the jobs, and under NCCL's own choice.
    true_us: float
    default_us: float
    #: The player's factor on the entropy weight.
    curiosity: float

    @property
    def speedup(self) -> float:
        """Time of NCCL's own choice over ours."""
        return self.default_us / self.true_us


class Player:
    """Plays N jobs, one episode after the other."""

    def __init__(
        self,
        env: DecisionEnv,
        state_units: int,
        recipe: Recipe,
        seed: int,
        *,
        is_greedy: bool = False,
    ) -> None:
        """Start an episode. `is_greedy`: take the most likely actions instead of drawing them."""
        self.env, self.recipe, self._units = env, recipe, state_units
        self._is_greedy = is_greedy
        self.random = torch.Generator().manual_seed(seed)
        self._draw_probes = np.random.default_rng(seed)
        # Actors explore by different amounts (Mnih et al. 2016, section 4: "explicitly use
        # different exploration policies in each actor-learner"); the paper draws epsilons, we a
        # factor of the entropy.
        self.curiosity = float(np.random.default_rng(seed).uniform(0.5, 2.0))
        self._begin(seed)

    def _begin(self, seed: int | None) -> None:
        jobs = self.env.num_envs
        self.seen = _rows(self.env.reset(seed=seed)[0])
        self.state = State.new(jobs, self._units)
        #: (N,) decisions of each job from probe to probe, 0 = none, and how many since the last.
        self.probe_every = torch.from_numpy(self._draw_probes.choice(self.recipe.probe_every, jobs))
        self._since_N = torch.zeros(jobs, dtype=torch.int64)

    def play(self, network: ActorCritic) -> Trajectory:
        """Play `num_steps` rounds, or those left in the episode."""
        begin, rows = self.state, [self.seen]
        made: list[tuple[torch.Tensor, ...]] = []
        true_us = default_us = 0.0
        while len(made) < self.recipe.num_steps and not self.env.is_over:
            with torch.no_grad():
                log_TRA, _, self.state = network(self.seen, self.state)
            is_probe_R = self._probe()
            action_R = self._choose(log_TRA[0]).masked_fill(is_probe_R, ABSTAIN_ACTION)
            found, _, _, _, info = self.env.step(action_R.view(self.env.num_envs, -1).numpy())
            self.seen = _rows(found)
            rows.append(self.seen)
            log_R = log_TRA[0].gather(1, action_R.unsqueeze(1)).squeeze(1)
            reward_R = self._scaled(_flat(info["earned"]))
            calls_R = _flat(info["calls"])
            made.append((action_R, log_R, is_probe_R, reward_R, calls_R))
            true_us += float(info["true_us"].sum())
            default_us += float(info["default_us"].sum())
        if self.env.is_over:
            self._begin(None)
        action, log_probability, is_probe, reward, calls = map(torch.stack, zip(*made, strict=True))
        return Trajectory(
            seen=RoundObservations(*map(torch.cat, zip(*rows, strict=True))),
            state=begin,
            action=action,
            log_probability=log_probability,
            is_probe=is_probe,
            reward=reward,
            calls=calls,
            true_us=true_us,
            default_us=default_us,
            curiosity=self.curiosity,
        )

    def _probe(self) -> torch.Tensor:
        """(R,) whose turn it is to be left to NCCL; counts as the policy module's `step` does."""
        is_new_NK = (self.seen.earned[0] != 0.0).view(self.env.num_envs, -1)
        found_NK = torch.zeros_like(is_new_NK)
        for key in range(is_new_NK.size(1)):
            is_due_N = (self._since_N + 1 >= self.probe_every) & (self.probe_every > 0)
            found_NK[:, key] = is_due_N
            counted_N = torch.where(is_due_N, 0, self._since_N + 1)
            self._since_N = torch.where(is_new_NK[:, key], counted_N, self._since_N)
        return found_NK.flatten()

    def _choose(self, log_RA: torch.Tensor) -> torch.Tensor:
        if self._is_greedy:
            return log_RA.argmax(dim=1)
        return torch.multinomial(log_RA.exp(), 1, generator=self.random).squeeze(1)

    def _scaled(self, earned_R: torch.Tensor) -> torch.Tensor:
        """Rewards (R,) as the recipe scales them; 0 for keys without calls."""
        scale = self.recipe.reward_scale
        if scale == "log":
            return -torch.log((-earned_R).clamp_min(1e-3)).masked_fill(earned_R == 0.0, 0.0)
        if scale == "raw":
            reference_ms = torch.from_numpy(self.env.tables.reference_us / 1000.0)
            return earned_R * reference_ms.to(earned_R.dtype).repeat(self.env.num_envs)
        return earned_R.clamp_min(-2.0) if scale == "clipped" else earned_R


def _rows(found: Mapping[str, Any]) -> RoundObservations:
    flat = (
        torch.from_numpy(found[name]).flatten(0, 1).unsqueeze(0)
        for name in RoundObservations._fields
    )
    seen = RoundObservations(*flat)
    return seen._replace(mask=seen.mask.float())


def _flat(part: np.ndarray[Any, Any]) -> torch.Tensor:
    return torch.from_numpy(part.astype(np.float32)).flatten()


@dataclass(frozen=True, slots=True)
class ActorSettings:
    """The parameters of one actor: its world, its recipe, its seed."""

    place: str
    tables: Tables
    world: World
    recipe: Recipe
    seed: int

    def env(self) -> DecisionEnv:
        """The environment of this actor."""
        recipe = self.recipe
        rounds = Rounds.of(
            self.world,
            episode_rounds=recipe.episode_rounds,
            seen_decisions=recipe.seen_decisions,
        )
        watch = None if not recipe.trigger else partial(Detector.load, Path(recipe.trigger))
        variation = Variation(recipe.vary, recipe.vary_times)
        return DecisionEnv(self.world, self.tables, recipe.jobs, rounds, watch, variation)

    def player(self, state_units: int) -> Player:
        """The player in this actor's environment."""
        torch.set_num_threads(1)
        torch.manual_seed(self.seed)
        return Player(self.env(), state_units, self.recipe, self.seed)


class Playing(Source):
    """The updates of a network by actors that play."""

    def __init__(self, network: ActorCritic, squares: list[torch.Tensor], actors: Any) -> None:
        """`squares` is the optimizer's statistic, one tensor for each parameter.

        `actors` are ActorProcesses, or as these.
        """
        self.network, self.squares, self.actors = network, squares, actors
        self.members = nn.ModuleList([network.actor])
        #: Calls that were played, and seconds of all parts of the run before this one.
        self._calls, self._before_s = 0, 0.0
        self._began = time.monotonic()

    def start(self, step: int) -> None:  # noqa: ARG002 - they play on as long as they may
        """Start the actors."""
        self.actors.start()

    def close(self) -> None:
        """Stop the actors."""
        self.actors.close()

    @property
    def metrics(self) -> dict[str, float]:
        """Calls that were played, and seconds, validation included."""
        seconds = self._before_s + time.monotonic() - self._began
        return {"simulated_calls": self._calls, "train_wall_s": seconds}

    def made(self, loss: float, speedup: float, calls: int) -> dict[str, float]:
        """Metrics of an update by so many calls."""
        self._calls += calls
        return {"loss": loss, "speedup": speedup}

    def state(self) -> dict[str, Any]:
        """Network, statistic and metrics; the actors go on meanwhile."""
        return {"network": self.network.state_dict(), "squares": self.squares, **self.metrics}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on with the weights; asynchronous actors do not repeat exactly."""
        self.network.load_state_dict(state["network"])
        for own, kept in zip(self.squares, state["squares"], strict=True):
            own.copy_(kept)
        self._calls, self._before_s = state["simulated_calls"], state["train_wall_s"]


#: Seconds between checks that the actors are alive while waiting.
_PATIENCE_S: Final = 5.0
CONTEXT: Final = multiprocessing.get_context("spawn")


class ActorProcesses:
    """One process for each order, which runs `play(player, put, is_orphan, own, *shared)`."""

    def __init__(
        self,
        orders: Sequence[ActorSettings],
        play: Callable[..., None],
        make: Callable[[], ActorCritic],
        *shared: Any,
        room: int = 0,
    ) -> None:
        """Start no process yet.

        Each has a network of its own by `make`, and what they share. `room`: items that wait at
        most, beyond which `put` raises queue.Full; 0 = any number.
        """
        self._orders, self._play, self._make, self._shared = orders, play, make, shared
        self._made: Any = CONTEXT.Queue(room)
        self._processes: list[Any] = []

    def start(self) -> None:
        """Start all processes."""
        for order in self._orders:
            given = (os.getpid(), order, self._made, self._make(), *self._shared)
            process = CONTEXT.Process(target=_run, args=(self._play, *given), daemon=True)
            process.start()
            self._processes.append(process)

    def next(self) -> Any:
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
                return pickle.loads(self._made.get(timeout=_PATIENCE_S))

    def close(self) -> None:
        """Stop them."""
        for process in self._processes:
            process.terminate()
            process.join()
        self._processes = []


def _run(
    play: Callable[..., None],
    parent: int,
    order: ActorSettings,
    made: Any,
    own: ActorCritic,
    *shared: Any,
) -> None:
    """The main function of an actor process: runs until done, or its parent is gone."""

    def put(item: object) -> None:
        # As bytes: torch would send each tensor as an open file.
        made.put_nowait(pickle.dumps(item))

    play(order.player(own.state_units), put, lambda: os.getppid() != parent, own, *shared)
    made.close()
    made.join_thread()
