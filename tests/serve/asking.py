"""The plugin's own brain client, as a program that tests can use."""

import subprocess
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from dynamiccl.datasets.history import Call
from dynamiccl.serve.brain_history import KeyCalls
from dynamiccl.serve.table import DecisionTable


def task_line(tasks: Sequence[KeyCalls]) -> str:
    """A history as `ask_brain` reads it."""
    words: list[object] = [len(tasks)]
    for task in tasks:
        words += [int(task.collective), task.bin, task.num_timed or 0, len(task.calls)]
        for call in task.calls:
            words += call_words(call)
    return " ".join(map(str, words))


def call_words(call: Call) -> list[object]:
    return [
        call.size_bytes,
        call.time_us,
        -1.0 if call.skew_us is None else call.skew_us,
        -1.0 if call.interference is None else call.interference,
        -1 if call.algorithm is None else int(call.algorithm),
        -1 if call.protocol is None else int(call.protocol),
        call.num_channels or 0,
    ]


class Asking:
    """One communicator's leader: `kind` is `socket`, `torch` or a library's path."""

    def __init__(self, build_dir: Path, kind: str, artifact: Path, socket: Path | None = None):
        command = [build_dir / "ask_brain", kind, artifact, "box", "1", "8"]
        self._process = subprocess.Popen(
            [*map(str, command), *([str(socket)] if socket else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.communicate(timeout=60)
        if error is None:
            assert self._process.returncode == 0

    def say(self, line: str) -> str:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return self.hear()

    def hear(self) -> str:
        assert self._process.stdout is not None
        return self._process.stdout.readline().removesuffix("\n")

    def table(self, tasks: Sequence[KeyCalls]) -> DecisionTable:
        """The table in its answer; anything else fails the test."""
        answer = self.say(task_line(tasks))
        assert not answer.startswith(("error", "keep")), answer
        return DecisionTable.from_bytes(bytes.fromhex(answer))
