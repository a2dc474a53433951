"""Brains for jobs in mode adaptive (DYNAMICCL_BRAIN), and what running ranks show and keep."""

import os
import re
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dynamiccl.collect.calls import SUFFIX, read_header, read_records
from dynamiccl.collect.output import FileReport
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.artifact import Artifact, open_artifact
from dynamiccl.serve.brain import POLICIES, Brain, BrainConfig, History, answers
from dynamiccl.serve.table import DecisionTable
from tests.serve.tables import uniform

#: As long as it may be in /bin/sh: the number of a question, and fields beside it.
_ANSWER: Final = r"sed -un 's/^{\(\"number\": [0-9]*\),.*/{\1%s}/p'".replace(r"\"", '"')
#: Fails where what is told of a key's number of calls does not fit its windows. Plays tables in
#: turn.
_COUNTING: Final = """
import json, sys

seen, overlaps = {}, 0
for asked, line in enumerate(sys.stdin):
    told = json.loads(line)
    assert told["tasks"] and told["table"]
    for collective, index, num_timed, calls in told["tasks"]:
        before, shown = seen.get((collective, index), (num_timed - len(calls), []))
        kept = max(len(calls) - (num_timed - before), 0)
        overlaps += 0 < kept < 8
        assert num_timed >= len(calls) > 0 and calls[:kept] == shown[len(shown) - kept :]
        seen[collective, index] = num_timed, calls
    assert asked < 30 or overlaps > 0
    table = sys.argv[1 + asked % (len(sys.argv) - 1)]
    print(json.dumps({"number": told["number"], "table": table}), flush=True)
"""


def answering(fields: str = "") -> str:
    """A command that answers every question with the same."""
    return _ANSWER % fields


def table_field(config: Config, num_ranks: int = 4, num_nodes: int = 1) -> str:
    return f', "table": "{uniform(config, num_nodes, num_ranks).to_bytes().hex()}"'


ONE, OTHER = Config(Algorithm.Ring, Protocol.Simple, 4), Config(Algorithm.Ring, Protocol.LL, 2)


def counting(folder: Path, *configs: Config, num_ranks: int = 4) -> str:
    """A command that plays `configs` in turn, and adds its process's number to `folder`/pid."""
    (folder / "brain.py").write_text(_COUNTING)
    tables = " ".join(uniform(each, 1, num_ranks).to_bytes().hex() for each in configs)
    return f"echo $$ >> {folder}/pid; exec {sys.executable} -S {folder}/brain.py {tables}"


def in_this_process(folder: Path, make: Callable[[Artifact], Brain]) -> str:
    """A command that hands questions to a thread of this process, which has what `make` makes."""
    asked, answered = folder / "asked", folder / "answered"
    for path in (asked, answered):
        os.mkfifo(path)

    def answer() -> None:
        with asked.open("rb") as questions, answered.open("w", buffering=1) as out:
            for line in answers(questions, make):
                out.write(f"{line}\n")

    threading.Thread(target=answer, daemon=True).start()
    return f"exec 3<&0; cat <&3 > {asked} & exec cat {answered}"


class Recorder:
    """A search that keeps what it was shown and what it answered."""

    def __init__(self, artifact: Path, policy: str) -> None:
        self._brain = POLICIES[policy](open_artifact(artifact))
        self.shown: list[History] = []
        self.answers: list[DecisionTable] = []

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        self.shown.append(history)
        answer = self._brain.decide(config, history)
        if answer is not None:
            self.answers.append(answer)
        return answer


def look(folder: Path) -> str:
    """An action of all ranks, `*at(100, look(folder), rank=ALL)`; see `ranks_in`."""
    folder.mkdir()
    return f"sh=cat /proc/$PPID/task/*/comm /proc/$PPID/maps > {folder}/$PPID"


def ranks_in(folder: Path) -> list[str]:
    """The names of each rank's threads, and its libraries, in lines."""
    return [path.read_text() for path in folder.iterdir()]


def records_of(directory: Path, rank: int) -> npt.NDArray[np.void]:
    """All records of one rank, in the order of the calls."""
    found: list[npt.NDArray[np.void]] = []
    for path in sorted(
        directory.rglob(f"*{SUFFIX}"), key=lambda path: int(read_header(path)["number"])
    ):
        report = FileReport(path=str(path), format="calls")
        records = read_records(path, report)
        found.append(records[records["rank"] == rank])
        assert not report.rejected, report
    records = np.concatenate(found)
    ordered: npt.NDArray[np.void] = records[np.argsort(records["enqueued_ns"], kind="stable")]
    return ordered


def metrics_of(text: str) -> dict[tuple[str, str], float]:
    """Values by name and labels; fails for a line that is not of Prometheus' text format."""
    form = r"(# HELP \w+ .*|# TYPE \w+ (counter|gauge)|\w+(\{[^{}]*\})? [-+.\w]+)\n"
    assert re.fullmatch(f"({form})+", text), text
    names = re.findall(r"^# TYPE (\w+)", text, re.MULTILINE)
    found = re.findall(r"^(\w+)(?:\{(.*)\})? (\S+)$", text, re.MULTILINE)
    values = {(name, labels): float(value) for name, labels, value in found}
    assert len(set(names)) == len(names), text
    assert len(values) == len(found), text
    assert {name for name, _ in values} <= set(names), text
    return values
