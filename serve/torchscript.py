"""What a brain is asked with, the TorchScript files of an artifact, and whether they agree.

Torch is loaded only when needed.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import HISTORY_SLICE, Observations
from dynamiccl.datasets.history import (
    WINDOW_LENGTH,
    Call,
    CallColumns,
    Float32Array,
    history_arrays,
)
from dynamiccl.datasets.manifest import BRAIN_NAME, POLICY_NAME, Manifest
from dynamiccl.datasets.questions import cold_questions, decide, table_supports
from dynamiccl.errors import ArtifactMismatch, CorruptFile, MachineError
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.serve.table import ENTRY, MAX_BINS, DecisionTable, relative_path

#: What `brain.pt` wants of a call, as float64. An unknown algorithm, protocol, interference or skew
#: is -1, an unknown number of channels 0.
CALL_COLUMNS: Final = ("valid", *CallColumns.__slots__)
#: Share of decisions that may come out otherwise on another processor, where two configs are
#: predicted to be equally fast and floats round differently. The artifact's table counts.
NEAR_TIES: Final = 0.01
#: Features are float32 of about 1 to 40: rounding of a logarithm's last bits, no more.
_TOLERANCE: Final = 1e-5
_RANDOM_WINDOWS: Final = 512


@dataclass(frozen=True, slots=True)
class BrainConfig:
    """The communicator that asks."""

    system: str
    #: NCCL's own nNodes.
    num_nodes: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class KeyCalls:
    """One task key of a communicator, (collective, size bin), and its latest calls.

    Raises ValueError for what no communicator has.
    """

    collective: Collective
    bin: int
    #: Oldest first, at most WINDOW_LENGTH.
    calls: tuple[Call, ...]
    #: Calls of the key that have been timed so far, of which `calls` are the last. None: these are
    #: old ones, by which the choice in force was judged and withdrawn.
    num_timed: int | None = None

    def __post_init__(self) -> None:
        if not self.collective.tunable or not 0 <= self.bin < MAX_BINS:
            raise ValueError(f"{self.collective.wire} at bin {self.bin} is in no table")
        if len(self.calls) > WINDOW_LENGTH:
            raise ValueError(f"{len(self.calls)} calls are more than a window's {WINDOW_LENGTH}")


@dataclass(frozen=True, slots=True)
class History:
    """A communicator's task keys with their latest calls."""

    #: Task keys with at least one timed call.
    tasks: tuple[KeyCalls, ...]
    #: In force now; None while NCCL's own choice stands everywhere.
    table: DecisionTable | None


@contextmanager
def ignore_deprecation() -> Iterator[None]:
    """Suppress the warning: TorchScript is deprecated from torch 2.13 on."""
    with warnings.catch_warnings():
        # Of any category: a DeprecationWarning in torch 2.13, a FutureWarning from 2.14 on.
        warnings.filterwarnings("ignore", r"`torch\.jit\.")
        yield


class ScriptedPolicy:
    """A loaded `policy.pt`."""

    def __init__(self, path: Path) -> None:
        """Load a file; raises MachineError without torch, and CorruptFile."""
        self._torch, self._module = load_script(path)

    def act(self, observations: Observations, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """(N,) actions for N observations, among those that `mask` (N, A) allows."""
        return self._forward(observations, mask)[0]

    def values(
        self, observations: Observations, mask: npt.NDArray[np.bool_]
    ) -> npt.NDArray[np.float32]:
        """(N, A) Q values for N observations: minus the expected time over the reference."""
        return self._forward(observations, mask)[1]

    def least_gains(self, observations: Observations) -> npt.NDArray[np.float64] | None:
        """(N, A) of `train.policy.TorchPolicy.least_gains`."""
        if not hasattr(self._module, "predict"):
            return None
        with self._torch.no_grad():
            context = self._torch.from_numpy(observations.context)
            _, spread, caution = self._module.predict(context)
        least = caution.unsqueeze(1) * spread.clamp(min=1e-9)
        found: npt.NDArray[np.float64] = least.double().numpy()
        return found

    def _forward(
        self, observations: Observations, mask: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        torch = self._torch
        with torch.no_grad():
            action, q = self._module(
                torch.from_numpy(observations.window),
                torch.from_numpy(observations.context),
                torch.from_numpy(mask.astype(np.float32)),
            )
        return action.numpy(), q.numpy()


class ScriptedBrain:
    """A loaded `brain.pt`, the module that the plugin's TorchScript runtime runs."""

    def __init__(self, path: Path) -> None:
        """Load a file; raises as `ScriptedPolicy`, and CorruptFile for one of an older release."""
        self._path = path
        self._torch, self._module = load_script(path)
        if not hasattr(self._module, "decide"):
            raise CorruptFile(f"{path} is of an older release; export the artifact again")

    def decide(self, config: BrainConfig, tasks: Sequence[KeyCalls]) -> DecisionTable | None:
        """The table for a history; None where the artifact has none for this shape.

        Raises ArtifactMismatch when an entry is one that NCCL cannot run.
        """
        found = self._module.find_shape(config.system, config.num_nodes, config.num_ranks)
        if not found:
            return None
        shape, num_nodes, num_ranks, ranks_per_node, first_bin, num_bins = found
        warm = [t for t in tasks if t.calls and 0 <= t.bin - first_bin < num_bins]
        rows = np.array([t.collective * num_bins + t.bin - first_bin for t in warm], dtype=np.int64)
        with self._torch.no_grad():
            columns = self._module.decide(shape, *self._told(warm, rows)).numpy()
        entries = np.array([tuple(row) for row in columns], dtype=ENTRY)
        try:
            return DecisionTable(
                num_nodes=num_nodes,
                num_ranks=num_ranks,
                ranks_per_node=ranks_per_node,
                first_bin=first_bin,
                num_bins=num_bins,
                entries=entries.reshape(-1, num_bins),
            )
        except ValueError as error:
            raise ArtifactMismatch(
                f"{self._path} decides what NCCL cannot run: {error}; export the artifact again"
            ) from error

    def interference(
        self, tasks: Sequence[KeyCalls], rows: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float64]:
        """(N, K) interference of the calls of N task keys, as the policy sees it; -1: unknown.

        `rows` (N,) identifies the keys. New calls in the windows are remembered.
        """
        with self._torch.no_grad():
            filled = self._module.watch(*self._told(tasks, rows))
        known: npt.NDArray[np.float64] = filled[:, :, CALL_COLUMNS.index("interference")].numpy()
        return known

    def _told(self, tasks: Sequence[KeyCalls], rows: npt.NDArray[np.int64]) -> list[Any]:
        """What the module takes of tasks: rows, calls, numbers of calls."""
        timed = np.array(
            [-1 if t.num_timed is None else t.num_timed for t in tasks], dtype=np.int64
        )
        calls = raw_calls([task.calls for task in tasks])
        return [self._torch.from_numpy(each) for each in (rows, calls, timed)]

    def observe(self, windows: Sequence[Sequence[Call]]) -> tuple[Float32Array, Float32Array]:
        """Window (N, K, W) and history features (N, H), as its own feature code makes them."""
        with self._torch.no_grad():
            window, history = self._module.features(self._torch.from_numpy(raw_calls(windows)))
        return window.numpy(), history.numpy()

    def act(
        self,
        windows: Sequence[Sequence[Call]],
        context: Float32Array,
        mask: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int64]:
        """(N,) actions for calls and cold contexts, among those that `mask` (N, A) allows."""
        torch = self._torch
        with torch.no_grad():
            action = self._module(
                torch.from_numpy(raw_calls(windows)),
                torch.from_numpy(context),
                torch.from_numpy(mask.astype(np.float32)),
            )
        chosen: npt.NDArray[np.int64] = action.numpy()
        return chosen


def raw_calls(windows: Sequence[Sequence[Call]]) -> npt.NDArray[np.float64]:
    """(N, WINDOW_LENGTH, len(CALL_COLUMNS)) of the latest calls of N task keys, right-aligned."""
    raw = np.zeros((len(windows), WINDOW_LENGTH, len(CALL_COLUMNS)), dtype=np.float64)
    for row, calls in zip(raw, windows, strict=True):
        recent = list(calls)[-WINDOW_LENGTH:]
        if recent:
            told = CallColumns.of(recent)
            facts = [np.ones(len(recent)), *(getattr(told, name) for name in CallColumns.__slots__)]
            row[-len(recent) :] = np.stack(facts, axis=1)
    return raw


def load_script(path: Path) -> tuple[Any, Any]:
    """torch, and the module at `path`; raises MachineError without torch, and CorruptFile."""
    try:
        import torch
    except ImportError as error:
        raise MachineError(
            "making, verifying or asking a policy needs torch; install it with "
            "'pip install dynamiccl[train]', or do this step where you train"
        ) from error
    with ignore_deprecation():
        try:
            return torch, torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise CorruptFile(f"{path} is not a TorchScript file: {error}") from error


# --- Whether they agree ---


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
