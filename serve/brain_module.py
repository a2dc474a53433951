"""The exported brain: policy, feature code and cold observations in one TorchScript module.

The leader of a communicator runs it inside the job, where there is no Python: it takes calls as
they were recorded and answers with table entries, so C++ needs neither JSON nor feature code. The
features are those of `datasets/history.py`, frozen with the policy that learned on them;
`serve/brain_check.py` compares them with those of `datasets/history.py`.

    N questions, K calls in the window, C columns of a call, W features of a call, H features of the
    history, F features of the context, A actions, R = 5 x size bins questions of a shape
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dynamiccl.datasets.features import HISTORY_SLICE
from dynamiccl.datasets.history import (
    HISTORY_COLUMNS,
    WINDOW_LENGTH,
    CallColumns,
    Columns,
    HistoryColumns,
    Past,
    positions,
)
from dynamiccl.datasets.questions import ColdQuestions
from dynamiccl.nccl import Config
from dynamiccl.schedule import config_columns
from dynamiccl.serve.job_state import asking
from dynamiccl.serve.torchscript import CALL_COLUMNS, ignore_deprecation
from dynamiccl.serve.watcher import NoWatcher, Watcher


class HistoryFeatures(nn.Module):
    """(calls_NKC float64) -> (window_NKW, history_NH): `history_features`.

    Python code that TorchScript cannot compile, so it is traced: see `traced_features`.
    """

    def __init__(self, columns: HistoryColumns) -> None:
        """Compute so many columns of the window and of the history."""
        super().__init__()
        self.columns = columns

    def forward(self, calls_NKC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls are right-aligned, oldest first; a row whose `valid` is 0 is padding."""
        valid, *facts = calls_NKC.unbind(2)
        past = Past(torch, CallColumns(*facts), valid > 0.5)
        window_NKW = torch.cat([_computed(past, each) for each in self.columns.window], dim=2)
        window_NKW = torch.where(past.valid.unsqueeze(2), window_NKW, 0.0)
        at = positions(self.columns.window_features)
        parts = [
            _computed(past, each)
            if isinstance(each, Columns)
            else window_NKW[:, -1, at[each.column]].unsqueeze(1)
            for each in self.columns.history
        ]
        history_NH = torch.where(past.valid[:, -1:], torch.cat(parts, dim=1), 0.0)
        return window_NKW.to(torch.float32), history_NH.to(torch.float32)


def _computed(past: Past, columns: Columns) -> torch.Tensor:
    values: torch.Tensor = columns.of(past)
    found = values.to(torch.float64)
    return found.unsqueeze(-1) if len(columns.features) == 1 else found


def traced_features(columns: HistoryColumns = HISTORY_COLUMNS) -> Any:
    """`HistoryFeatures` as TorchScript, for any number of windows."""
    example = torch.ones(2, WINDOW_LENGTH, len(CALL_COLUMNS), dtype=torch.float64)
    with ignore_deprecation():
        return torch.jit.trace(HistoryFeatures(columns), example)  # type: ignore[no-untyped-call]


class BrainModule(nn.Module):
    """A policy that takes recorded calls and returns entries of a decision table."""

    systems: list[str]
    #: num_nodes, num_ranks, ranks_per_node, first_bin, num_bins of each shape.
    shapes: list[list[int]]
    contexts: list[torch.Tensor]
    masks: list[torch.Tensor]
    entries: torch.Tensor
    #: The facts of a call in order; the plugin compares them with its own list.
    call_columns: list[str]

    def __init__(
        self,
        policy: nn.Module,
        configs: Sequence[Config],
        questions: Sequence[ColdQuestions],
        trigger: nn.Module | None = None,
    ) -> None:
        """Put a loaded policy, its catalogue and the cold questions of every shape together.

        `trigger`: a loaded `trigger.pt`, that says what interference calls were under.
        """
        super().__init__()
        self.asking = asking(policy)
        self.watcher = NoWatcher() if trigger is None else Watcher(trigger, WINDOW_LENGTH)
        self.features = traced_features()
        self.history_start = HISTORY_SLICE.start
        self.history_stop = HISTORY_SLICE.stop
        self.window_length = WINDOW_LENGTH
        self.call_columns = list(CALL_COLUMNS)
        self.systems = [asked.support.system for asked in questions]
        self.shapes = [
            [
                asked.support.num_nodes,
                asked.support.num_ranks,
                asked.support.num_ranks // asked.support.num_nodes,
                asked.first_bin,
                asked.num_bins,
            ]
            for asked in questions
        ]
        self.contexts = [torch.from_numpy(asked.context) for asked in questions]
        self.masks = [torch.from_numpy(asked.mask) for asked in questions]
        rows = [config_columns(config) for config in configs]
        self.register_buffer("entries", torch.tensor(rows, dtype=torch.int32))

    @torch.jit.export
    def find_shape(self, system: str, num_nodes: int, num_ranks: int) -> int:
        """Index of a communicator shape; -1 when the artifact has no table for it."""
        for index, shape in enumerate(self.shapes):
            found = self.systems[index] == system
            if found and shape[0] == num_nodes and shape[1] == num_ranks:
                return index
        return -1

    @torch.jit.export
    def shape(self, index: int) -> list[int]:
        """num_nodes, num_ranks, ranks_per_node, first_bin and num_bins of a shape."""
        return self.shapes[index]

    @torch.jit.export
    def cold(self, shape: int) -> torch.Tensor:
        """All R entries of a shape's table (R, 5), without history."""
        context_RF = self.contexts[shape]
        size = [context_RF.size(0), self.window_length, len(self.call_columns)]
        none_RKC = torch.zeros(size, dtype=torch.float64)
        mask_RA = self.masks[shape].to(torch.float32)
        return self.entries.index_select(0, self.forward(none_RKC, context_RF, mask_RA))

    @torch.jit.export
    def watch(
        self, row_N: torch.Tensor, calls_NKC: torch.Tensor, timed_N: torch.Tensor
    ) -> torch.Tensor:
        """The calls (N, K, C), with interference where it was unknown; see `Watcher`.

        Before `warm` of the same rows, whose policy may want to know which of them are new.
        """
        self.asking.tell(row_N, timed_N)
        return self.watcher(row_N, calls_NKC, timed_N)  # type: ignore[no-any-return]

    @torch.jit.export
    def warm(self, shape: int, row_N: torch.Tensor, calls_NKC: torch.Tensor) -> torch.Tensor:
        """The entries (N, 5) of rows `row_N` of a table, given their latest calls."""
        context_NF = self.contexts[shape].index_select(0, row_N)
        mask_NA = self.masks[shape].index_select(0, row_N).to(torch.float32)
        window_NKW, context_NF = self._observe(calls_NKC, context_NF)
        action_N = self.asking(row_N, window_NKW, context_NF, mask_NA)
        return self.entries.index_select(0, self._allowed(action_N, mask_NA))

    def forward(
        self, calls_NKC: torch.Tensor, context_NF: torch.Tensor, mask_NA: torch.Tensor
    ) -> torch.Tensor:
        """(N,) actions for keys of new jobs.

        ABSTAIN where the default was not measured (`questions.decide`).
        """
        window_NKW, context_NF = self._observe(calls_NKC, context_NF)
        # Not what asks it about this job, whose state stays.
        action_N = self.asking.policy(window_NKW, context_NF, mask_NA)[0]
        return self._allowed(action_N, mask_NA)

    def _observe(
        self, calls_NKC: torch.Tensor, context_NF: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        window_NKW, history_NH = self.features(calls_NKC)
        before, after = context_NF[:, : self.history_start], context_NF[:, self.history_stop :]
        return window_NKW, torch.cat([before, history_NH, after], dim=1)

    def _allowed(self, action_N: torch.Tensor, mask_NA: torch.Tensor) -> torch.Tensor:
        return torch.where(mask_NA[:, 0] > 0.5, action_N, torch.zeros_like(action_N))


def write_brain(
    policy: Path,
    configs: Sequence[Config],
    questions: Sequence[ColdQuestions],
    path: Path,
    trigger: Path | None = None,
) -> None:
    """Write `brain.pt` from a `policy.pt` and optionally a `trigger.pt`."""
    with ignore_deprecation():
        loaded: Any = torch.jit.load(str(policy), map_location="cpu")  # type: ignore[no-untyped-call]
        watching: Any = None
        if trigger is not None:
            watching = torch.jit.load(str(trigger), map_location="cpu")  # type: ignore[no-untyped-call]
        brain = BrainModule(loaded, configs, questions, watching)
        scripted: Any = torch.jit.script(brain.eval())
        # Not by its own writer, which ends the process on a full disk (torch 2.13).
        path.write_bytes(scripted.save_to_buffer())
    # The plugin takes no file that somebody else can change.
    path.chmod(path.stat().st_mode & ~0o022)
