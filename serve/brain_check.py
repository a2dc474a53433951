"""Checks that an artifact's `brain.pt` reproduces its tables, its policy and its trigger.

And that it finds the interference that `trigger.pt` finds when it is given call after call.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import HISTORY_SLICE, Observations
from dynamiccl.datasets.history import WINDOW_LENGTH, Call, Float32Array, history_arrays
from dynamiccl.datasets.manifest import BRAIN_NAME, POLICY_NAME, TRIGGER_NAME, Manifest
from dynamiccl.datasets.questions import cold_questions, decide, table_supports
from dynamiccl.errors import ArtifactMismatch
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.serve.table import DecisionTable, relative_path
from dynamiccl.serve.torchscript import (
    BrainConfig,
    KeyCalls,
    ScriptedBrain,
    ScriptedPolicy,
    ScriptedTrigger,
)

#: Share of decisions that may come out otherwise on another processor, where two configs are
#: predicted to be equally fast and floats round differently. The artifact's table counts.
NEAR_TIES: Final = 0.01
#: Features are float32 of about 1 to 40: rounding of a logarithm's last bits, no more.
_TOLERANCE: Final = 1e-5
_RANDOM_WINDOWS: Final = 512
#: Task keys and questions of the check of the Trigger.
_WATCHED_KEYS: Final = 6
_QUESTIONS: Final = 30


def differing_share(one: DecisionTable, other: DecisionTable) -> float:
    """Share of entries in which two tables differ; 1 for tables of different shapes."""
    if one.entries.shape != other.entries.shape or one.first_bin != other.first_bin:
        return 1.0
    return float((one.entries != other.entries).mean())


def check_brain(directory: Path, manifest: Manifest, *, seed: int = 0) -> None:
    """Compare `brain.pt` with the tables and, on random histories, with features and policy.

    Raises ArtifactMismatch.
    """
    brain = ScriptedBrain(directory / BRAIN_NAME)
    policy = ScriptedPolicy(directory / POLICY_NAME)
    random = np.random.default_rng(seed)
    for support in table_supports(manifest):
        shape = (support.system, support.num_nodes, support.num_ranks)
        path = directory / relative_path(*shape)
        decided = brain.decide(BrainConfig(*shape), [])
        if decided is None or differing_share(DecisionTable.read(path), decided) > NEAR_TIES:
            raise _mismatch(directory, f"without a history it does not decide what {path} says")
        asked = cold_questions(manifest, support)
        rows = random.integers(len(asked.context), size=_RANDOM_WINDOWS)
        windows = random_windows(random, _RANDOM_WINDOWS)
        observations = _observations(windows, asked.context[rows])
        window, history = brain.observe(windows)
        pairs = (window, observations.window), (history, observations.context[:, HISTORY_SLICE])
        if not all(np.allclose(*pair, rtol=_TOLERANCE, atol=_TOLERANCE) for pair in pairs):
            raise _mismatch(directory, "its features are not those of this release")
        actions = brain.act(windows, asked.context[rows], asked.mask[rows])
        if (actions != decide(policy, observations, asked.mask[rows])).mean() > NEAR_TIES:
            raise _mismatch(directory, f"on a history it does not decide what {POLICY_NAME} does")


def check_trigger(directory: Path, *, seed: int = 0) -> None:
    """Compare what `brain.pt` finds in overlapping windows with `trigger.pt`, call by call.

    Raises ArtifactMismatch.
    """
    brain = ScriptedBrain(directory / BRAIN_NAME)
    trigger = ScriptedTrigger(directory / TRIGGER_NAME)
    rows = np.arange(_WATCHED_KEYS)
    for tasks, wanted in watched_questions(trigger, np.random.default_rng(seed), _QUESTIONS):
        found = brain.interference(tasks, rows)
        if not np.allclose(found, wanted, rtol=1e-4, atol=1e-4):
            raise _mismatch(
                directory, f"it does not find the interference that {TRIGGER_NAME} does"
            )


def watched_questions(
    trigger: ScriptedTrigger, random: np.random.Generator, count: int
) -> Iterator[tuple[list[KeyCalls], npt.NDArray[np.float64]]]:
    """Questions about a few keys of a job that slows down, and the interference (N, K) of each.

    Between two questions there are none to more calls than a window holds, whose configs change.
    """
    told: list[list[Call]] = [[] for _ in range(_WATCHED_KEYS)]
    levels: list[list[float]] = [[] for _ in range(_WATCHED_KEYS)]
    seen = [0] * _WATCHED_KEYS
    for question in range(count):
        slowness = 1.0 if question < count // 2 else 1.6
        for key in range(_WATCHED_KEYS):
            for _ in range(random.integers(0, WINDOW_LENGTH + 3)):
                told[key].append(_call_of_job(random, key, slowness))
            # What falls out of the window before a question is never seen.
            new = min(len(told[key]) - seen[key], WINDOW_LENGTH)
            seen[key] = len(told[key])
            for call in told[key][len(told[key]) - new :]:
                stream = (key, call.algorithm, call.protocol, call.num_channels)
                levels[key].append(trigger.tell(key, stream, call.time_us, call.size_bytes))
        wanted = np.zeros((_WATCHED_KEYS, WINDOW_LENGTH))
        tasks = []
        for key in range(_WATCHED_KEYS):
            calls = told[key][-WINDOW_LENGTH:]
            tasks.append(KeyCalls(Collective.AllReduce, key, tuple(calls), len(told[key])))
            if calls:
                wanted[key, -len(calls) :] = levels[key][-len(calls) :]
        yield tasks, wanted


def _call_of_job(random: np.random.Generator, key: int, slowness: float) -> Call:
    protocol = Protocol.Simple if random.random() < 0.9 else Protocol.LL128
    noise = 0.02 * random.standard_t(3)
    return Call(
        size_bytes=1 << (16 + key),
        time_us=float(slowness * (20.0 + 10.0 * key) * np.exp(noise)),
        algorithm=Algorithm.Ring,
        protocol=protocol,
        num_channels=8,
    )


def random_windows(random: np.random.Generator, count: int) -> list[list[Call]]:
    """Windows of 0 to WINDOW_LENGTH calls with every kind of knowledge missing now and then."""
    return [
        [_random_call(random) for _ in range(random.integers(WINDOW_LENGTH + 1))]
        for _ in range(count)
    ]


def _random_call(random: np.random.Generator) -> Call:
    known = random.random(5) < 0.8
    return Call(
        size_bytes=int(np.exp2(random.uniform(3, 34))),
        time_us=float(np.exp2(random.uniform(0, 20))),
        algorithm=Algorithm(int(random.integers(len(Algorithm)))) if known[0] else None,
        protocol=Protocol(int(random.integers(len(Protocol)))) if known[1] else None,
        num_channels=int(random.integers(1, 65)) if known[2] else None,
        interference=float(random.uniform(0, 3)) if known[3] else None,
        skew_us=float(np.exp2(random.uniform(-3, 14))) if known[4] else None,
    )


def _observations(windows: Sequence[Sequence[Call]], context: Float32Array) -> Observations:
    observations = Observations.cold(context.copy())
    for row, calls in enumerate(windows):
        observations.window[row], observations.context[row, HISTORY_SLICE] = history_arrays(calls)
    return observations


def _mismatch(directory: Path, reason: str) -> ArtifactMismatch:
    return ArtifactMismatch(f"{directory / BRAIN_NAME}: {reason}; export the artifact again")
