"""The brain as it is exported: policy, feature code and cold questions in one TorchScript module.

The leader of a communicator runs it inside the job, where there is no Python: it takes calls as
they were recorded and answers with table entries, so C++ needs neither JSON nor feature code. The
features are those of `datasets/history.py`, frozen with the policy that learned
on them; `serve/brain_check.py` compares the two.

    N questions, K calls in the window, C columns of a call, W features of a call, H features of the
    history, F features of the context, A actions, R = 5 x size bins questions of a shape
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from torch import nn

from dynamiccl.datasets.features import (
    HISTORY_FEATURES,
    MAX_INFLIGHT,
    STATIC_FEATURES,
    WINDOW_FEATURES,
    WINDOW_LENGTH,
)
from dynamiccl.datasets.questions import ColdQuestions
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.table import entry_of
from dynamiccl.serve.torchscript import CALL_COLUMNS, ignore_deprecation
from dynamiccl.serve.watcher import NoWatcher, Watcher

_COLUMN: Final = {name: index for index, name in enumerate(CALL_COLUMNS)}


class HistoryFeatures(nn.Module):
    """(calls_NKC float64) -> (window_NKW, history_NH): `history_features`."""

    window_names: list[str]
    history_names: list[str]
    algorithms: list[str]
    protocols: list[str]
    columns: dict[str, int]

    def __init__(self) -> None:
        """Take the features' names and order from `datasets/features.py`."""
        super().__init__()
        self.window_names = [feature.name for feature in WINDOW_FEATURES]
        self.history_names = [feature.name for feature in HISTORY_FEATURES]
        self.algorithms = [algorithm.wire for algorithm in Algorithm]
        self.protocols = [protocol.wire for protocol in Protocol]
        self.columns = dict(_COLUMN)
        self.max_inflight = float(MAX_INFLIGHT)

    def forward(self, calls_NKC: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Calls are right-aligned, oldest first; a row whose `valid` is 0 is padding."""
        valid_NK = calls_NKC[:, :, self.columns["valid"]] > 0.5
        # Padding gets harmless numbers, so that no logarithm is taken of 0.
        size_NK = torch.where(valid_NK, calls_NKC[:, :, self.columns["size_bytes"]], 1000.0)
        time_NK = torch.where(valid_NK, calls_NKC[:, :, self.columns["time_us"]], 1.0)
        gbytes_NK = size_NK / (1000.0 * time_NK)
        used = self.config_used(calls_NKC)
        interference_NK = calls_NKC[:, :, self.columns["interference"]]

        window = dict(used)
        window["valid"] = torch.ones_like(time_NK)
        window["log2_time"] = torch.log2(time_NK)
        channels_NK = calls_NKC[:, :, self.columns["num_channels"]]
        throughput_NK = torch.log2(gbytes_NK / channels_NK.clamp(min=1.0))
        window["log2_channel_throughput"] = torch.where(channels_NK > 0.5, throughput_NK, 0.0)
        window["changed"] = self.changed(calls_NKC, valid_NK)
        window["interference"] = interference_NK.clamp(min=0.0)
        window_NKW = torch.stack([window[name] for name in self.window_names], dim=2)
        window_NKW = torch.where(valid_NK.unsqueeze(2), window_NKW, 0.0)

        skew_N = calls_NKC[:, -1, self.columns["skew_us"]]
        btlbw_N = torch.where(valid_NK, gbytes_NK, 0.0).amax(dim=1)
        rtprop_N = torch.where(valid_NK, time_NK, float("inf")).amin(dim=1)
        known_N = valid_NK[:, -1]
        rtprop_N = torch.where(known_N, rtprop_N, 1.0)
        btlbw_N = torch.where(known_N, btlbw_N, 1.0)
        history: dict[str, torch.Tensor] = {}
        for name in used:
            history["last_" + name] = used[name][:, -1]
        history["last_known"] = torch.ones_like(skew_N)
        history["interference_known"] = (interference_NK[:, -1] >= 0.0).to(torch.float64)
        history["interference"] = interference_NK[:, -1].clamp(min=0.0)
        history["skew_known"] = (skew_N >= 0.0).to(torch.float64)
        history["log2_skew"] = torch.log2(1.0 + skew_N.clamp(min=0.0))
        history["sense_known"] = torch.ones_like(skew_N)
        history["log2_ebb"] = torch.log2(gbytes_NK[:, -1])
        history["log2_btlbw"] = torch.log2(btlbw_N)
        history["log2_rtprop"] = torch.log2(rtprop_N)
        inflight_N = size_NK[:, -1] / (btlbw_N * rtprop_N * 1000.0)
        history["inflight_over_bdp"] = inflight_N.clamp(max=self.max_inflight)
        history_NH = torch.stack([history[name] for name in self.history_names], dim=1)
        history_NH = torch.where(known_N.unsqueeze(1), history_NH, 0.0)
        return window_NKW.to(torch.float32), history_NH.to(torch.float32)

    def config_used(self, calls_NKC: torch.Tensor) -> dict[str, torch.Tensor]:
        """One-hot algorithm and protocol, and log2 channels: each (N, K)."""
        used: dict[str, torch.Tensor] = {}
        algorithm_NK = calls_NKC[:, :, self.columns["algorithm"]]
        for index, name in enumerate(self.algorithms):
            used["algorithm_" + name] = (algorithm_NK == float(index)).to(torch.float64)
        protocol_NK = calls_NKC[:, :, self.columns["protocol"]]
        for index, name in enumerate(self.protocols):
            used["protocol_" + name] = (protocol_NK == float(index)).to(torch.float64)
        channels_NK = calls_NKC[:, :, self.columns["num_channels"]]
        used["log2_channels"] = torch.log2(channels_NK.clamp(min=1.0))
        return used

    def changed(self, calls_NKC: torch.Tensor, valid_NK: torch.Tensor) -> torch.Tensor:
        """(N, K) whether a call's config differs from that of the call before."""
        first = self.columns["algorithm"]
        config_NK3 = calls_NKC[:, :, first : first + 3]
        differs_NK = (config_NK3[:, 1:] != config_NK3[:, :-1]).any(dim=2) & valid_NK[:, :-1]
        return torch.cat([torch.zeros_like(valid_NK[:, :1]), differs_NK], dim=1).to(torch.float64)


class BrainModule(nn.Module):
    """A policy that is asked about calls and answers with entries of a decision table."""

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
        self.policy = policy
        self.watcher = NoWatcher() if trigger is None else Watcher(trigger, WINDOW_LENGTH)
        self.features = HistoryFeatures()
        self.num_static = len(STATIC_FEATURES)
        self.num_history = len(HISTORY_FEATURES)
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
        rows = [entry_of(config) for config in configs]
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
        """All R entries of a shape's table (R, 5), as nothing but the job is known."""
        num_rows = self.contexts[shape].size(0)
        size = [num_rows, self.window_length, len(self.call_columns)]
        return self.warm(shape, torch.arange(num_rows), torch.zeros(size, dtype=torch.float64))

    @torch.jit.export
    def watch(
        self, row_N: torch.Tensor, calls_NKC: torch.Tensor, timed_N: torch.Tensor
    ) -> torch.Tensor:
        """The calls (N, K, C), with interference where it was unknown; see `Watcher`."""
        return self.watcher(row_N, calls_NKC, timed_N)  # type: ignore[no-any-return]

    @torch.jit.export
    def warm(self, shape: int, row_N: torch.Tensor, calls_NKC: torch.Tensor) -> torch.Tensor:
        """The entries (N, 5) of some of a table's rows, given their latest calls."""
        context_NF = self.contexts[shape].index_select(0, row_N)
        mask_NA = self.masks[shape].index_select(0, row_N).to(torch.float32)
        return self.entries.index_select(0, self.forward(calls_NKC, context_NF, mask_NA))

    def forward(
        self, calls_NKC: torch.Tensor, context_NF: torch.Tensor, mask_NA: torch.Tensor
    ) -> torch.Tensor:
        """(N,) actions; abstains where the default was not measured (`questions.decide`)."""
        window_NKW, history_NH = self.features(calls_NKC)
        after = self.num_static + self.num_history
        parts = [context_NF[:, : self.num_static], history_NH, context_NF[:, after:]]
        action_N = self.policy(window_NKW, torch.cat(parts, dim=1), mask_NA)[0]
        return torch.where(mask_NA[:, 0] > 0.5, action_N, torch.zeros_like(action_N))


def write_brain(
    policy: Path,
    configs: Sequence[Config],
    questions: Sequence[ColdQuestions],
    path: Path,
    trigger: Path | None = None,
) -> None:
    """Write `brain.pt` from a `policy.pt` and perhaps a `trigger.pt`; all are TorchScript."""
    with ignore_deprecation():
        loaded: Any = torch.jit.load(str(policy), map_location="cpu")  # type: ignore[no-untyped-call]
        watching: Any = None
        if trigger is not None:
            watching = torch.jit.load(str(trigger), map_location="cpu")  # type: ignore[no-untyped-call]
        brain = BrainModule(loaded, configs, questions, watching)
        scripted: Any = torch.jit.script(brain.eval())
        scripted.save(str(path))
    # The plugin takes no file that somebody else can change.
    path.chmod(path.stat().st_mode & ~0o022)
