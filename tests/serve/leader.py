"""The leader's side of a brain in Python; the real one is C++ (arbiter/brain_thread.h)."""

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from dynamiccl.datasets.history import UNKNOWN, Call
from dynamiccl.serve.brain import BrainConfig, History, KeyCalls
from dynamiccl.serve.table import DecisionTable

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
