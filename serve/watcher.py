"""The Trigger inside a brain: fills in the interference of calls, processing each call once.

A leader shows its brain windows that overlap: the latest calls of each task key, and how many there
have been. Here is remembered what was seen, a state for each stream (a task key under one config)
and the levels of the calls that windows still show. Like the brain's, it is one communicator's.

N task keys, K calls in the window, C columns of a call
"""

from typing import Any, Final

import torch
from torch import nn

from dynamiccl.nccl import MAX_CHANNELS, Algorithm, Protocol
from dynamiccl.serve.torchscript import CALL_COLUMNS, TIMED_MODULO

#: Streams of a communicator; a config beyond them stays unwatched.
MAX_STREAMS: Final = 4096


class NoWatcher(nn.Module):
    """A brain without Trigger: interference stays as recorded."""

    def forward(
        self,
        row: torch.Tensor,  # noqa: ARG002 - as Watcher has it
        calls: torch.Tensor,
        timed: torch.Tensor,  # noqa: ARG002
    ) -> torch.Tensor:
        """The calls, unchanged."""
        return calls


class Watcher(nn.Module):
    """(rows (N,), calls (N, K, C), timed (N,)) -> the calls, their interference filled in."""

    columns: dict[str, int]
    #: Task key -> its place in `seen` and `levels`; stream -> its place in `state`.
    keys: dict[int, int]
    streams: dict[int, int]

    def __init__(self, trigger: Any, window_length: int) -> None:
        """Wrap a loaded `trigger.pt`."""
        super().__init__()
        self.trigger = trigger
        self.columns = {name: index for index, name in enumerate(CALL_COLUMNS)}
        self.keys = {}
        self.streams = {}
        self.state = torch.zeros(0, trigger.state_size)
        #: Of each key, what levels under other configs still say.
        self.carried = trigger.new_keys(0)
        #: Calls of each key that were timed when it was last asked about; -1: never asked.
        self.seen = torch.zeros(0, dtype=torch.int64)
        #: Of the latest calls, as a window has them.
        self.levels = torch.zeros(0, window_length)
        self.max_streams = MAX_STREAMS
        self.modulo = TIMED_MODULO
        self.algorithms = len(Algorithm) + 1
        self.protocols = len(Protocol) + 1
        self.channels = MAX_CHANNELS + 1
        self.unknown = -1.0

    def forward(self, row: torch.Tensor, calls: torch.Tensor, timed: torch.Tensor) -> torch.Tensor:
        """The calls with their interference.

        `timed`: total number of calls of each key, modulo TIMED_MODULO; -1 where the leader does
        not tell: interference stays unknown.
        """
        length = calls.size(1)
        valid = calls[:, :, self.columns["valid"]] > 0.5
        is_told = timed >= 0
        key = self.find_keys(row)
        seen = self.seen[key]
        shown = valid.sum(dim=1)
        fresh = torch.minimum(torch.remainder(timed - seen, self.modulo), shown)
        fresh = torch.where(is_told, torch.where(seen < 0, shown, fresh), 0)
        levels = self.levels[key]
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
            which = key[due]
            self.carried[which], told = self.trigger.carry(
                self.carried[which], stream[due, place], level[due]
            )
            level[due] = told
            moved = torch.cat([levels[:, 1:], level.unsqueeze(1)], dim=1)
            levels = torch.where(due.unsqueeze(1), moved, levels)
        self.levels[key] = levels
        self.seen[key] = torch.where(is_told, timed, seen)
        told = calls[:, :, self.columns["interference"]]
        filled = torch.where(
            valid & is_told.unsqueeze(1) & (told < 0.0), levels.to(told.dtype), told
        )
        calls = calls.clone()
        calls[:, :, self.columns["interference"]] = filled
        return calls

    def find_keys(self, row: torch.Tensor) -> torch.Tensor:
        """(N,) slots of task keys; new ones are created."""
        found: list[int] = []
        numbers: list[int] = row.tolist()
        for each in numbers:
            if each not in self.keys:
                self.keys[each] = len(self.keys)
            found.append(self.keys[each])
        more = len(self.keys) - self.seen.size(0)
        if more > 0:
            self.seen = torch.cat([self.seen, torch.full((more,), -1, dtype=torch.int64)])
            unknown = torch.full((more, self.levels.size(1)), self.unknown)
            self.levels = torch.cat([self.levels, unknown])
            self.carried = torch.cat([self.carried, self.trigger.new_keys(more)])
        return torch.tensor(found, dtype=torch.int64)

    def find_streams(
        self, row: torch.Tensor, calls: torch.Tensor, valid: torch.Tensor
    ) -> torch.Tensor:
        """(N, K) slots of the streams of calls; -1 for padding, and beyond the capacity."""
        algorithm = calls[:, :, self.columns["algorithm"]] + 1.0
        protocol = calls[:, :, self.columns["protocol"]] + 1.0
        channels = calls[:, :, self.columns["num_channels"]]
        config = (algorithm * self.protocols + protocol) * self.channels + channels
        most = self.algorithms * self.protocols * self.channels
        code = torch.where(valid, row.unsqueeze(1) * most + config.to(torch.int64), -1)
        found: list[int] = []
        numbers: list[int] = code.flatten().tolist()
        for each in numbers:
            if each >= 0 and each not in self.streams and len(self.streams) < self.max_streams:
                self.streams[each] = len(self.streams)
            found.append(self.streams.get(each, -1))
        more = len(self.streams) - self.state.size(0)
        if more > 0:
            self.state = torch.cat([self.state, torch.zeros(more, self.state.size(1))])
        return torch.tensor(found, dtype=torch.int64).view(code.size(0), code.size(1))
