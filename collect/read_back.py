"""Reads what a launch printed and logged: rows of its blocks, and what really ran.

Text is what survives a crash, JSON has the digits: JSON is taken when it is whole and holds every
row of the text, the text otherwise. A row that cannot be read, or of a size that is not the next of
the walk, ends what is believed: the blocks from there on count as not reached, and run again.
"""

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from itertools import cycle, takewhile
from pathlib import Path
from typing import Final

from dynamiccl.collect.grid import Setting
from dynamiccl.collect.lines import plain_lines
from dynamiccl.collect.nccl_log import logged_calls, write_costs
from dynamiccl.collect.output import (
    MEANT_AS_ROW,
    RUN,
    FileReport,
    RankLine,
    Row,
    Run,
    TextRuns,
    rank_lines,
    read_json,
)
from dynamiccl.collect.schedule import Choice, Grid, Launch, calls_of, trial_row, warmup_of
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.datasets.schema import Source, Status
from dynamiccl.errors import DataError

#: Lines of Slurm and of Open MPI, which end the other ranks and tell each of them.
_LAUNCHERS: Final = re.compile(r"(?:srun|slurmstepd\S*|mpirun|mpiexec|prte\w*): |\[\S+:\d+\] PRTE ")
#: Columns of a row that are of its launch: the runner knows them.
_OF_A_LAUNCH: Final = {RUN, "source_line", "datatype", "reduction_op", "root"}
_FAILURE: Final = re.compile(r"(?i)Test \w+ failure|error|NCCL WARN|DYNAMICCL:|invalid")


def read_rows(
    lines: Sequence[str], json: Path, *, sizes: Sequence[int]
) -> tuple[list[list[Row]], Row]:
    """The rows of each block of a launch, in order, and the environment columns that it names.

    A block has an out-of-place row, and an in-place one where there is such. `lines` is everything
    printed, `json` where JSON was asked for (it need not be there), `sizes` are those of one walk
    in bytes, as printed.
    """
    blocks, told = _text_blocks(lines)
    from_json, also = _json_blocks(json)
    blocks, from_json = _believed(blocks, sizes), _believed(from_json, sizes)
    if from_json and len(from_json) >= len(blocks):
        # The JSON output has no release of nccl-tests.
        return from_json, told | also
    return blocks, told


def last_words(lines: Sequence[str]) -> str:
    """The error lines of a failed benchmark, else its last; and a launcher's, which names nodes."""
    told = [line.strip() for line in lines if line.strip() and not MEANT_AS_ROW.search(line)]
    launchers = [line for line in told if _LAUNCHERS.match(line)]
    # Comment lines are the table's header, which does not explain a failure.
    own = [line for line in told if not _LAUNCHERS.match(line) and not line.startswith("#")]
    words = ([line for line in own if _FAILURE.search(line)] or own)[-3:]
    words += launchers[:1] if words else launchers[:3]
    return " | ".join(words)[:600] or "no output"


def is_impossible(lines: Sequence[str]) -> bool:
    """Whether NCCL logged that no such combination exists (2.24 and later, `src/enqueue.cc`)."""
    return any("no algorithm/protocol available" in line.lower() for line in lines)


def _text_blocks(lines: Sequence[str]) -> tuple[list[list[Row]], Row]:
    report = FileReport("output", Source.NCCL_TESTS_TEXT.value)
    found = TextRuns(report)
    # A row that cannot be read (torn, or without a time) still takes its place in the walk.
    rows = list(found.rows(plain_lines(lines)))
    first = next((half for row in rows for half in row), None)
    told = _told(found.runs[first[RUN]]) if first else {}
    return [[_measured(half, report.format) for half in row] for row in rows], told


def _json_blocks(path: Path) -> tuple[list[list[Row]], Row]:
    report = FileReport(str(path), Source.NCCL_TESTS_JSON.value)
    try:
        halves, run = read_json(path, report)
    except (FileNotFoundError, DataError):
        return [], {}  # cut off by a crash: the text has what was measured
    blocks: list[list[Row]] = []
    # One that is left out would give its place to the next.
    for half in halves if not (report.num_rejected or report.dropped) else ():
        if not (half["in_place"] and blocks and len(blocks[-1]) == 1):
            blocks.append([])
        blocks[-1].append(_measured(half, report.format))
    return blocks, _told(run)


def _measured(half: Row, source: str) -> Row:
    status = Status.WRONG_VALUES if half["wrong_values"] else Status.OK
    told = {k: v for k, v in half.items() if k not in _OF_A_LAUNCH and v is not None}
    numbers = {k: v for k, v in told.items() if not isinstance(v, float) or math.isfinite(v)}
    return {"source": source, "status": status.value, **numbers}


def _told(run: Run) -> Row:
    """The environment columns that a run names; what two lines say differently is not known."""
    told = {
        "gpu": {line.gpu for line in run.ranks if line.gpu},
        "nccl_version": run.nccl.versions,
        "nccl_tests_version": run.tests_versions,
    }
    return {name: next(iter(values)) for name, values in told.items() if len(values) == 1}


def _believed(blocks: Sequence[list[Row]], sizes: Sequence[int]) -> list[list[Row]]:
    """The blocks before the first one that is torn or not of the expected size."""
    pairs = zip(blocks, cycle(sizes), strict=False)
    good = takewhile(lambda pair: pair[0] and pair[0][0]["size_bytes"] == pair[1], pairs)
    return [block for block, _ in good]


def wrong_comms(setting: Setting, lines: Sequence[str]) -> str | None:
    """Why the communicators differ from the setting's, or None when they agree or are unknown.

    nccl-tests prints the colour of each rank as its group (`src/util.cu`, writeDeviceReport).
    """
    groups: dict[int, list[RankLine]] = defaultdict(list)
    for line in rank_lines(lines):
        groups[line.group].append(line)
    if setting.comms is None:
        if len(groups) < 2:
            return None
        return (
            f"nccl-tests made {len(groups)} communicators of the ranks in place of one; remove "
            "NCCL_TESTS_SPLIT from the environment, and use split in the sweep file"
        )
    found = {
        tuple(sorted(line.rank for line in group)): len({line.host for line in group})
        for group in groups.values()
    }
    if {found.get(members) for members in setting.comms} == {setting.num_nodes}:
        return None
    return (
        f"nccl-tests made other communicators than split '{setting.split}' asks for "
        f"({', '.join(f'{len(group)} ranks on {on} hosts' for group, on in found.items())}); build "
        "it with MPI, and start ranks node by node (srun --distribution=block, mpirun --map-by ppr)"
    )


def comm_logs(folder: Path) -> list[list[str]]:
    """NCCL's log lines in a launch's folder, one list for each communicator.

    Each rank writes a file of its own (`schedule.environment`), and the first rank of a
    communicator logs its calls.
    """
    paths = sorted(folder.glob("nccl.*.log"))
    files = [path.read_text(errors="replace").splitlines() for path in paths]
    told = [lines for lines in files if any(logged_calls(lines))]
    return told if len(told) > 1 else [[line for lines in files for line in lines]]


def choices_of(
    logs: Sequence[Sequence[str]], file: SweepFile, launch: Launch, grid: Grid
) -> list[Choice | None]:
    """What ran in each block of a read-back launch, where the logs of all communicators agree.

    NCCL prints one line for each call of rank 0, in the order of the calls (NCCL 2.20 and later;
    channels from 2.24 on). That order is known (warm-up, then block by block), so every line
    belongs to one trial. None where a block's calls differ or are unnamed; shorter than the grid
    where a log ends early (a crash), and empty where it is not one of these calls.
    """
    counts = calls_of(launch, file)
    warmup = sum(count for _, count in warmup_of(launch.setting, grid, counts))
    each = []
    for log in logs:
        calls = list(logged_calls(log))[warmup:]
        found: list[Choice | None] = []
        # With a single size nothing else reveals a miscount of calls.
        whole = len(calls) <= len(grid.blocks) * counts.per_block
        places = range(0, len(calls) if whole else 0, counts.per_block)
        for place, wanted in zip(places, cycle(grid.benchmark_bytes), strict=False):
            part = calls[place : place + counts.per_block]
            sizes = {call.whole_bytes(launch.setting.num_ranks) for call in part}
            if len(part) < counts.per_block or sizes != {wanted}:
                break
            choices = {call.choice for call in part}
            one = choices.pop()
            found.append([*one] if one is not None and not choices else None)
        each.append(found)
    blocks = zip(*each, strict=False)
    return [block[0] if all(one == block[0] for one in block) else None for block in blocks]


def keep_costs(out: Path, file: SweepFile, launch: Launch, log: Sequence[str]) -> None:
    """Keep the cost table of a log's TUNING section as a part of `costs`, if it holds just one."""
    run = Run(0)
    for line in log:
        if " Bytes -> " not in line:
            run.note(line, 0)
    table = run.nccl.cost_table()
    if table is not None:
        known = trial_row(file, launch, launch.trials[0])
        known |= {"gpu": None, "nccl_version": None, **_told(run)}
        write_costs(out, table, known, program="run")
