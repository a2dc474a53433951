"""A CSV table of NVIDIA's example tuner as an entry.

The format is that of nccl v2.30.7 `plugins/tuner/example`:

`collective_type,min_bytes,max_bytes,algorithm,protocol,channels,nNodes,nRanks,numPipeOps,regBuff`

-1 matches every nNodes, nRanks, numPipeOps and regBuff; the last two may be left out, and tasks are
of one operation and unregistered buffers. Channels of 0 or -1 leave the count to NCCL. As there, a
row whose algorithm and protocol are not to be had changes nothing. Without a row NCCL's own choice
stands (that plugin sets one channel then, which is nobody's wish).
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.errors import CorruptFile, MissingPath, UnknownName
from dynamiccl.evaluate.policies import Actions
from dynamiccl.evaluate.worlds.draws import Draw, choice_text
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol

SUFFIX: Final = ".csv"
_FIELDS: Final = "collective,minBytes,maxBytes,algorithm,protocol,channels,nNodes,nRanks"
_ANY: Final = -1
#: numPipeOps and regBuff of every task.
_OF_TASKS: Final = (1, 0)


@dataclass(frozen=True, slots=True)
class NvidiaRow:
    """One row of the table."""

    line: int
    collective: Collective
    min_bytes: int
    max_bytes: int
    config: Config
    num_nodes: int
    num_ranks: int
    #: numPipeOps and regBuff, where the row has them.
    others: tuple[int, ...]

    @classmethod
    def parse(cls, text: str, line: int, where: str) -> Self:
        """Parse a line; raises CorruptFile and UnknownName, which name it."""
        fields = [field.strip() for field in text.split(",")]
        if not 8 <= len(fields) <= 10:
            raise CorruptFile(
                f"{where} has {len(fields)} fields; write {_FIELDS}, and numPipeOps,regBuff if "
                "you like"
            )
        collective, algorithm, protocol = (fields[place] for place in (0, 3, 4))
        try:
            least, most, channels, nodes, ranks, *others = (
                int(fields[place]) for place in range(1, len(fields)) if place not in (3, 4)
            )
        except ValueError as error:
            raise CorruptFile(f"{where}: {error}; write {_FIELDS}") from error
        return cls(
            line,
            Collective.parse(collective, where=where),
            least,
            most,
            Config(
                Algorithm.parse(algorithm, where=where),
                Protocol.parse(protocol, where=where),
                channels if channels > 0 else None,
            ),
            nodes,
            ranks,
            tuple(others),
        )

    def matches(self, collective: str, size_bytes: int, num_nodes: int, num_ranks: int) -> bool:
        """Whether the row applies to a task."""
        return (
            self.collective.wire == collective
            and self.min_bytes <= size_bytes <= self.max_bytes
            and self.num_nodes in {_ANY, num_nodes}
            and self.num_ranks in {_ANY, num_ranks}
            and all(o in {_ANY, own} for o, own in zip(self.others, _OF_TASKS, strict=False))
        )


def read_rows(path: Path) -> list[NvidiaRow]:
    """The rows of a table; raises MissingPath, CorruptFile and UnknownName."""
    if not path.is_file():
        raise MissingPath("table", path, "give a CSV file of NVIDIA's example tuner")
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        NvidiaRow.parse(line, number, f"{path}, line {number}")
        for number, line in enumerate(lines, start=1)
        if line.strip() and not line.startswith("#")
    ]


def table_actions(path: Path, draw: Draw) -> Actions:
    """(T,) actions of a table; raises as `read_rows`.

    Raises UnknownName, too, for a channel count that was not measured in this world: its time is
    not known.
    """
    rows, choices = read_rows(path), draw.choices
    chosen = np.full(len(choices), ABSTAIN_ACTION, dtype=np.int64)
    places = draw.truth.tasks.select("collective", "size_bytes", "num_nodes", "num_ranks")
    for task, place in enumerate(places.iter_rows()):
        row = next((row for row in rows if row.matches(*place)), None)
        if row is None:
            continue
        pair = choice_text(Config(row.config.algorithm, row.config.protocol))
        same = [name for name in choices[task] if f"{name}/".startswith(f"{pair}/")]
        named = choice_text(row.config)
        if same and named not in choices[task]:
            where = f"{path}, line {row.line}"
            raise UnknownName(f"choice of task {draw.tasks[task]}", named, same, where=where)
        chosen[task] = choices[task].get(named, ABSTAIN_ACTION)
    return chosen
