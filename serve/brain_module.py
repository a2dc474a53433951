"""The exported brain: policy, feature code and cold observations in one TorchScript module.

It takes calls as they were recorded and answers with table entries, so C++ needs no feature code.
The features are those of `datasets/history.py`, frozen with the policy that learned on them.

A leader shows its brain windows that overlap: the latest calls of each task key, and how many there
have been. So two parts remember what was shown before, for one communicator: what asks a policy
that has a state of the job, and the Trigger's, a state for each stream (a task key under one
config) and the levels of the calls that windows still show.

    N questions or task keys, K calls in the window, C columns of a call, W features of a call, H
    features of the history, F features of the context, A actions, R = 5 x size bins questions of a
    shape, U units of the state
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dynamiccl.datasets import history
from dynamiccl.datasets.features import HISTORY_SLICE
from dynamiccl.datasets.questions import ColdQuestions
from dynamiccl.nccl import MAX_CHANNELS, NUM_TUNED_COLLECTIVES, Algorithm, Config, Protocol
from dynamiccl.schedule import config_columns
from dynamiccl.serve.brain import CALL_COLUMNS
from dynamiccl.serve.table import MAX_BINS
from dynamiccl.train.policy import ignored_deprecation, load_script, load_trigger, save_script

#: Task keys of a communicator: a table's collectives and size bins.
MAX_ROWS: Final = NUM_TUNED_COLLECTIVES * MAX_BINS


class HistoryFeatures(nn.Module):
    """(calls_NKC float64) -> (window_NKW, history_NH); traced, for it cannot be scripted."""

    def forward(self, calls_NKC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls are right-aligned, oldest first; a row whose `valid` is 0 is padding."""
        valid, *facts = calls_NKC.unbind(2)
        past = history.Past(torch, history.CallColumns(*facts), valid > 0.5)
        window_NKW = torch.cat([_computed(past, each) for each in history.WINDOW], dim=2)
        window_NKW = torch.where(past.valid.unsqueeze(2), window_NKW, 0.0)
        history_NH = torch.cat([_computed(past, each) for each in history.HISTORY], dim=1)
        history_NH = torch.where(past.valid[:, -1:], history_NH, 0.0)
        return window_NKW.to(torch.float32), history_NH.to(torch.float32)


def _computed(past: history.Past, columns: history.Columns) -> torch.Tensor:
    values: torch.Tensor = columns.of(past)
    found = values.to(torch.float64)
    return found.unsqueeze(-1) if len(columns.features) == 1 else found


def traced_features() -> Any:
    """`HistoryFeatures` as TorchScript, for any number of windows."""
    example = torch.ones(2, history.WINDOW_LENGTH, len(CALL_COLUMNS), dtype=torch.float64)
    with ignored_deprecation():
        return torch.jit.trace(HistoryFeatures(), example)  # type: ignore[no-untyped-call]


class Watcher(nn.Module):
    """(rows (N,), calls (N, K, C), timed (N,)) -> the calls, their interference filled in."""

    columns: dict[str, int]
    #: Stream -> its place in `state`.
    streams: dict[int, int]

    def __init__(self, trigger: Any, window_length: int) -> None:
        super().__init__()
        self.trigger = trigger
        self.columns = {name: index for index, name in enumerate(CALL_COLUMNS)}
        self.streams = {}
        self.state = torch.zeros(0, trigger.state_size)
        #: What levels under other configs still say of each row.
        self.carried = trigger.new_keys(MAX_ROWS)
        #: Calls of each row that were timed at the last question.
        self.seen = torch.zeros(MAX_ROWS, dtype=torch.int64)
        self.unknown = -1.0
        self.levels = torch.full((MAX_ROWS, window_length), self.unknown)
        self.algorithms = len(Algorithm) + 1
        self.protocols = len(Protocol) + 1
        self.channels = MAX_CHANNELS + 1

    def forward(self, row: torch.Tensor, calls: torch.Tensor, timed: torch.Tensor) -> torch.Tensor:
        """`timed`: total calls of each key; -1, not told, leaves interference unknown."""
        length = calls.size(1)
        valid = calls[:, :, self.columns["valid"]] > 0.5
        is_told = timed >= 0
        seen = self.seen[row]
        shown = valid.sum(dim=1)
        fresh = torch.where(is_told, torch.minimum(timed - seen, shown), 0)
        levels = self.levels[row]
        stream = self.find_streams(row, calls, valid)
        log_time = torch.log(calls[:, :, self.columns["time_us"]]).to(torch.float32)
        log_size = torch.log(calls[:, :, self.columns["size_bytes"]]).to(torch.float32)
        for place in range(length):
            due = fresh >= length - place
            if not bool(due.any()):
                continue
            level = torch.full_like(levels[:, 0], self.unknown)
            index = torch.nonzero(due & (stream[:, place] >= 0)).squeeze(1)
            slot = stream[index, place]
            state, _, found = self.trigger(
                self.state[slot], log_time[index, place], log_size[index, place]
            )
            self.state[slot] = state
            level[index] = found
            which = row[due]
            self.carried[which], told = self.trigger.carry(
                self.carried[which], stream[due, place], level[due]
            )
            level[due] = told
            moved = torch.cat([levels[:, 1:], level.unsqueeze(1)], dim=1)
            levels = torch.where(due.unsqueeze(1), moved, levels)
        self.levels[row] = levels
        self.seen[row] = torch.where(is_told, timed, seen)
        told = calls[:, :, self.columns["interference"]]
        filled = torch.where(
            valid & is_told.unsqueeze(1) & (told < 0.0), levels.to(told.dtype), told
        )
        calls = calls.clone()
        calls[:, :, self.columns["interference"]] = filled
        return calls

    def find_streams(
        self, row: torch.Tensor, calls: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """(N, K) slots of calls' streams; -1 for padding."""
        algorithm = calls[:, :, self.columns["algorithm"]] + 1.0
        protocol = calls[:, :, self.columns["protocol"]] + 1.0
        channels = calls[:, :, self.columns["num_channels"]]
        config = (algorithm * self.protocols + protocol) * self.channels + channels
        most = self.algorithms * self.protocols * self.channels
        code = torch.where(valid, row.unsqueeze(1) * most + config.to(torch.int64), -1)
        found: list[int] = []
        numbers: list[int] = code.flatten().tolist()
        for each in numbers:
            if each >= 0 and each not in self.streams:
                self.streams[each] = len(self.streams)
            found.append(self.streams.get(each, -1))
        more = len(self.streams) - self.state.size(0)
        if more > 0:
            self.state = torch.cat([self.state, torch.zeros(more, self.state.size(1))])
        return torch.tensor(found, dtype=torch.int64).view(code.size(0), code.size(1))


class BrainModule(nn.Module):
    """Recorded calls to table entries; a policy's state steps for keys with new calls."""

    has_state: Final[bool]
    systems: list[str]
    #: Index, num_nodes, num_ranks, ranks_per_node, first_bin, num_bins.
    shapes: list[list[int]]
    contexts: list[torch.Tensor]
    masks: list[torch.Tensor]
    entries: torch.Tensor
    #: The facts of a call in order, which the plugin compares with its own.
    call_columns: list[str]

    def __init__(
        self,
        policy: Any,
        configs: Sequence[Config],
        questions: Sequence[ColdQuestions],
        trigger: nn.Module | None = None,
    ) -> None:
        super().__init__()
        self.policy = policy
        self.has_state = hasattr(policy, "state_units")
        if self.has_state:
            #: Of each row: the last decision, the number of calls, whether some are new.
            self.decided = torch.full((MAX_ROWS,), -1)
            self.timed = torch.full((MAX_ROWS,), -1)
            self.fresh = torch.ones(MAX_ROWS, dtype=torch.bool)
            self.h = torch.zeros(1, int(policy.state_units))
            self.c = torch.zeros(1, int(policy.state_units))
        self.watcher = None if trigger is None else Watcher(trigger, history.WINDOW_LENGTH)
        self.features = traced_features()
        self.history_start = HISTORY_SLICE.start
        self.history_stop = HISTORY_SLICE.stop
        self.window_length = history.WINDOW_LENGTH
        self.call_columns = list(CALL_COLUMNS)
        self.systems = [asked.support.system for asked in questions]
        self.shapes = [
            [
                index,
                asked.support.num_nodes,
                asked.support.num_ranks,
                asked.support.num_ranks // asked.support.num_nodes,
                asked.first_bin,
                asked.num_bins,
            ]
            for index, asked in enumerate(questions)
        ]
        self.contexts = [torch.from_numpy(asked.context) for asked in questions]
        self.masks = [torch.from_numpy(asked.mask) for asked in questions]
        rows = [config_columns(config) for config in configs]
        self.register_buffer("entries", torch.tensor(rows, dtype=torch.int32))

    @torch.jit.export
    def find_shape(self, system: str, num_nodes: int, num_ranks: int) -> list[int]:
        """What `shapes` has of a communicator; empty: no table."""
        for index, shape in enumerate(self.shapes):
            found = self.systems[index] == system
            if found and shape[1] == num_nodes and shape[2] == num_ranks:
                return shape
        empty: list[int] = []
        return empty

    @torch.jit.export
    def decide(
        self, shape: int, row_N: torch.Tensor, calls_NKC: torch.Tensor, timed_N: torch.Tensor
    ) -> torch.Tensor:
        """(R, 5) entries of a shape's table; `timed_N` counts each row's calls, -1: not told."""
        context_RF, mask_RA = self.contexts[shape], self.masks[shape].to(torch.float32)
        size = [context_RF.size(0), self.window_length, len(self.call_columns)]
        action_R = self.forward(torch.zeros(size, dtype=torch.float64), context_RF, mask_RA)
        if row_N.numel() > 0:
            mask_NA = mask_RA.index_select(0, row_N)
            calls_NKC = self.watch(row_N, calls_NKC, timed_N)
            window_NKW, context_NF = self._observe(calls_NKC, context_RF.index_select(0, row_N))
            if self.has_state:
                action_N = self._in_turn(row_N, window_NKW, context_NF, mask_NA)
            else:
                action_N = self.policy(window_NKW, context_NF, mask_NA)[0]
            action_R = action_R.index_copy(0, row_N, self._allowed(action_N, mask_NA))
        return self.entries.index_select(0, action_R)

    @torch.jit.export
    def watch(
        self, row_N: torch.Tensor, calls_NKC: torch.Tensor, timed_N: torch.Tensor
    ) -> torch.Tensor:
        """The calls (N, K, C), with interference where it was unknown."""
        if self.has_state:
            self.fresh[row_N] = (timed_N < 0) | (self.timed[row_N] != timed_N)
            self.timed[row_N] = timed_N
        if self.watcher is not None:
            calls_NKC = self.watcher(row_N, calls_NKC, timed_N)
        return calls_NKC

    def _in_turn(
        self,
        row_N: torch.Tensor,
        window_NKW: torch.Tensor,
        context_NF: torch.Tensor,
        mask_NA: torch.Tensor,
    ) -> torch.Tensor:
        """(N,) actions, each after the one before, with the state of the job."""
        rows: list[int] = row_N.tolist()
        found: list[torch.Tensor] = []
        for index in range(len(rows)):
            row = rows[index]
            action, _, h, c = self.policy.step(
                window_NKW[index : index + 1],
                context_NF[index : index + 1],
                mask_NA[index : index + 1],
                self.decided[row : row + 1],
                self.h,
                self.c,
            )
            if bool(self.fresh[row]):
                self.h, self.c = h, c
            self.decided[row : row + 1] = action
            found.append(action)
        return torch.cat(found)

    def forward(
        self, calls_NKC: torch.Tensor, context_NF: torch.Tensor, mask_NA: torch.Tensor
    ) -> torch.Tensor:
        """(N,) actions in new jobs; ABSTAIN where the default was not measured."""
        window_NKW, context_NF = self._observe(calls_NKC, context_NF)
        action_N = self.policy(window_NKW, context_NF, mask_NA)[0]
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
    """Write `brain.pt` of a policy and a Trigger; raises CorruptFile."""
    watching = None if trigger is None else load_trigger(trigger)
    save_script(BrainModule(load_script(policy), configs, questions, watching), path)
    # The plugin takes no file that somebody else can change.
    path.chmod(path.stat().st_mode & ~0o022)
