"""A small artifact whose policy uses the history, with random weights."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

import numpy as np
import torch
from torch import nn

from dynamiccl.datasets.history import UNKNOWN, WINDOW_LENGTH, Call
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.nccl import Algorithm, Collective, Protocol
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain import BrainConfig, History, KeyCalls, ScriptedBrain
from dynamiccl.serve.export import export_artifact
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import size_bin
from tests.policies import hand_made_manifest
from tests.rows import default, forced, frame

CONFIG = BrainConfig("box", 1, 8)
SIZES = [1 << k for k in range(16, 27)]
FIRST_BIN, NUM_BINS = size_bin(SIZES[0]), size_bin(SIZES[-1]) - size_bin(SIZES[0]) + 1
#: Expected times of the artifact's configs, in the order of its catalogue; NCCL's own choice: 1.
HINT: Final = {
    "Tree/LL": 1.4,
    "Tree/LL128": 1.4,
    "Tree/Simple": 0.8,
    "Ring/LL": 1.4,
    "Ring/LL128": 1.4,
    "Ring/Simple": 0.9,
    "Ring/Simple/4ch": 0.9,
}


class RandomPolicy(nn.Module):
    """An LSTM over the window beside the context, and a linear head: z of each action."""

    def __init__(self, window_size: int, context_size: int, action_size: int) -> None:
        super().__init__()
        self.encoder = nn.LSTM(window_size, 16, batch_first=True)
        self.head = nn.Linear(16 + context_size, action_size)

    def forward(
        self, window: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        # Ten times, so that what was seen weighs more than what was known.
        hidden = 10.0 * self.encoder(window)[0][:, -1]
        scores = self.head(torch.cat([hidden, context], dim=1))
        scores = scores.masked_fill(mask < 0.5, -1e6)
        return scores.argmax(dim=1), scores


class HintPolicy(nn.Module):
    """Predicts equal times for every task except those of `HINT`, and abstains."""

    times: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("times", torch.tensor([[1.0, *HINT.values()]]))

    def forward(
        self,
        window: torch.Tensor,  # noqa: ARG002 - the signature is every policy's
        context: torch.Tensor,  # noqa: ARG002
        mask: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        q = torch.neg(self.times).expand_as(mask).masked_fill(mask < 0.5, -1e6)
        return torch.zeros(mask.size(0), dtype=torch.int64), q


def make_manifest() -> Manifest:
    """Two collectives, 41 size bins, eight actions."""
    rows: list[dict[str, Any]] = []
    for size in SIZES:
        for collective, algorithms in (("AllReduce", ("Ring", "Tree")), ("AllGather", ("Ring",))):
            rows.append(default(collective=collective, size_bytes=size))
            rows += [
                forced(algorithm, protocol, collective=collective, size_bytes=size)
                for algorithm in algorithms
                for protocol in ("LL", "LL128", "Simple")
            ]
            rows.append(
                forced("Ring", "Simple", channels=4, collective=collective, size_bytes=size)
            )
    noise = frame().select("system", "collective", noise_band="time_us")
    return hand_made_manifest(frame(*rows), noise)


def make_artifact(parent: Path, policy: nn.Module | None = None) -> Artifact:
    """An artifact of `make_manifest`."""
    manifest = make_manifest()
    torch.manual_seed(5)
    policy = policy or RandomPolicy(
        len(manifest.window_features), len(manifest.features), len(manifest.catalogue)
    )
    folder = parent / "policy"
    folder.mkdir()
    torch.jit.script(policy).save(str(folder / "policy.pt"))  # type: ignore[no-untyped-call]
    manifest.write(folder)
    return export_artifact(folder, parent / "artifact")


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


def task(size_bytes: int, *us: float, collective: Collective = Collective.AllReduce) -> KeyCalls:
    """A task key that has had calls of Ring/Simple on 8 channels with these times."""
    calls = [
        Call(size_bytes, time_us, Algorithm.Ring, Protocol.Simple, 8, None, None) for time_us in us
    ]
    return KeyCalls(collective, size_bin(size_bytes), tuple(calls), len(calls))


def decided(
    brain: ScriptedBrain, tasks: Sequence[KeyCalls], config: BrainConfig = CONFIG
) -> DecisionTable | None:
    """What a brain decides where NCCL's own choice is in force."""
    return brain.decide(config, History(tuple(tasks), None))


NOTHING = History((), None)


def question_of(
    artifact: Path,
    config: BrainConfig,
    history: History = NOTHING,
    *,
    number: int = 1,
    brain: int = 1,
    forgotten: Sequence[int] = (),
) -> dict[str, Any]:
    """A leader's question."""
    return {
        "number": number,
        "brain": brain,
        "forgotten": list(forgotten),
        "artifact": str(artifact),
        "system": config.system,
        "num_nodes": config.num_nodes,
        "num_ranks": config.num_ranks,
        "table": history.table.to_bytes().hex() if history.table else "",
        "tasks": [_task(task) for task in history.tasks],
    }


def _task(task: KeyCalls) -> list[Any]:
    num_timed = UNKNOWN if task.num_timed is None else task.num_timed
    return [task.collective, task.bin, num_timed, [_call(call) for call in task.calls]]


def _call(call: Call) -> list[float]:
    codes = (call.algorithm, call.protocol, call.num_channels or 0, call.skew_us)
    known = (UNKNOWN if code is None else code for code in codes)
    return [call.size_bytes, call.time_us, *known]


class Leader:
    """Starts a brain, and asks it; leaving closes its stdin."""

    def __init__(self, *command: str | Path, environment: Mapping[str, str] | None = None) -> None:
        pipes: dict[str, Any] = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        self.process = subprocess.Popen(command, text=True, env=environment, **pipes)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.communicate(timeout=20)
        assert self.process.returncode == 0

    def told(self, line: str) -> Any:
        """The answer to a line."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return json.loads(self.process.stdout.readline())

    def table(
        self, artifact: Path, config: BrainConfig, tasks: Sequence[KeyCalls] = (), *, brain: int = 1
    ) -> DecisionTable:
        """The table in its answer; anything else fails the test."""
        question = question_of(artifact, config, History(tuple(tasks), None), brain=brain)
        return table_in(self.told(json.dumps(question)))


def table_in(answer: dict[str, Any]) -> DecisionTable:
    """The table in an answer; anything else fails the test."""
    assert "table" in answer, answer
    return DecisionTable.from_bytes(bytes.fromhex(answer["table"]))
