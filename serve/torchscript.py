"""What a brain is asked with, and the TorchScript files of an artifact; torch only when needed."""

import warnings
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.history import WINDOW_LENGTH, Call, CallColumns, Float32Array
from dynamiccl.errors import ArtifactMismatch, CorruptFile, MachineError
from dynamiccl.nccl import Collective
from dynamiccl.serve.table import ENTRY, MAX_BINS, DecisionTable

#: What `brain.pt` wants of a call, as float64. An unknown algorithm, protocol, interference or skew
#: is -1, an unknown number of channels 0.
CALL_COLUMNS: Final = ("valid", *CallColumns.__slots__)


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
    #: Calls of the key that have been timed so far, of which `calls` are the last. None: the leader
    #: does not say.
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
        self._torch, self._module = _load(path)

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
        """Load a file; raises as `ScriptedPolicy`."""
        self._path = path
        self._torch, self._module = _load(path)

    def decide(self, config: BrainConfig, tasks: Sequence[KeyCalls]) -> DecisionTable | None:
        """The table for a history; None where the artifact has none for this shape.

        Raises ArtifactMismatch when an entry is one that NCCL cannot run.
        """
        torch = self._torch
        shape = self._module.find_shape(config.system, config.num_nodes, config.num_ranks)
        if shape < 0:
            return None
        num_nodes, num_ranks, ranks_per_node, first_bin, num_bins = self._module.shape(shape)
        warm = [t for t in tasks if t.calls and 0 <= t.bin - first_bin < num_bins]
        with torch.no_grad():
            columns = self._module.cold(shape).numpy()
            if warm:
                rows = np.array([t.collective * num_bins + t.bin - first_bin for t in warm])
                calls = self._watched(warm, rows)
                columns[rows] = self._module.warm(shape, torch.from_numpy(rows), calls).numpy()
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
            filled = self._watched(tasks, rows)[:, :, CALL_COLUMNS.index("interference")]
        known: npt.NDArray[np.float64] = filled.numpy()
        return known

    def _watched(self, tasks: Sequence[KeyCalls], rows: npt.NDArray[np.int64]) -> Any:
        """Raw calls, with the interference found by the brain's own Trigger."""
        torch = self._torch
        calls = torch.from_numpy(raw_calls([task.calls for task in tasks]))
        timed = [-1 if t.num_timed is None else t.num_timed for t in tasks]
        return self._module.watch(torch.from_numpy(rows), calls, torch.tensor(timed))

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


class ScriptedTrigger:
    """A loaded `trigger.pt`: what tells how much longer than quiet calls take.

    A stream is the calls of one task key under one config; see `train/trigger/module.py`.
    """

    def __init__(self, path: Path) -> None:
        """Load a file; raises as `ScriptedPolicy`."""
        self._torch, self._module = _load(path)
        if not hasattr(self._module, "new_state"):
            raise CorruptFile(f"{path} is TorchScript, but no trigger; export the artifact again")
        self._states: dict[Hashable, Any] = {}
        self._numbers: dict[Hashable, int] = {}
        self._carried: dict[Hashable, Any] = {}

    def tell(self, key: Hashable, stream: Hashable, time_us: float, size_bytes: int) -> float:
        """Process the next call of a task key's stream: the key's level, -1 = unknown."""
        level = self.observe(stream, time_us, size_bytes)[1]
        torch = self._torch
        number = torch.tensor([self._numbers.setdefault(stream, len(self._numbers))])
        carried = self._carried.get(key)
        if carried is None:
            carried = self._module.new_keys(1)
        with torch.no_grad():
            self._carried[key], told = self._module.carry(carried, number, torch.tensor([level]))
        return float(told)

    def observe(self, stream: Hashable, time_us: float, size_bytes: int) -> tuple[int, float]:
        """Take the next call of a stream: alarm and level.

        Alarm: 1 while it is slow, -1 at a call that says that it is faster than what was taken for
        quiet, else 0. Level: 1 = twice the quiet time; -1 = unknown.
        """
        torch = self._torch
        state = self._states.get(stream)
        if state is None:
            state = self._module.new_state(1)
        facts = torch.tensor([time_us, size_bytes], dtype=torch.float64).log().to(torch.float32)
        with torch.no_grad():
            self._states[stream], alarm, level = self._module(state, facts[:1], facts[1:])
        return int(alarm), float(level)


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


def _load(path: Path) -> tuple[Any, Any]:
    """torch, and the module at `path`."""
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
