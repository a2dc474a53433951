"""Reads what a launch printed and logged: rows of its blocks, and what really ran.

    read_rows      the benchmark's text and JSON -> the halves of each block
    wrong_comms    several communicators at once: are they the right ones
    choices_of     NCCL's log of a read-back launch -> the config that ran in each block
    keep_costs     NCCL's cost table

Text is what survives a crash, JSON has the digits: JSON is taken when it is whole and holds every
row of the text, the text otherwise. A row that cannot be read, or of a size that is not the next of
the walk, ends what is believed: the blocks from there on count as not reached, and run again.
"""

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

from dynamiccl.collect.grid import Setting
from dynamiccl.collect.nccl_log import NcclLog, logged_calls, write_costs
from dynamiccl.collect.output import (
    RUN,
    FileReport,
    RankLine,
    Row,
    Run,
    TextRuns,
    rank_lines,
    read_json,
)
from dynamiccl.collect.schedule import Choice, Grid, Launch, trial_row
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.datasets.schema import Source, Status
from dynamiccl.errors import DataError

#: Lines of Slurm and of Open MPI, which end the other ranks and tell each of them.
_LAUNCHERS: Final = re.compile(r"(?:srun|slurmstepd\S*|mpirun|mpiexec|prte\w*): |\[\S+:\d+\] PRTE ")
#: A row: size, count, type, redop, root, and then times.
_ROW: Final = re.compile(r"\s*\d+\s+\d+\s+[a-z]\w+\s+\w+\s+-?\d+\s+[\d.]")
#: Columns of the benchmark's output that hold for a whole launch, and those of a half of a block;
#: the runner knows all others.
_OF_A_LAUNCH: Final = ("gpu", "nccl_version", "nccl_tests_version")
_OF_A_HALF: Final = (
    "size_bytes", "in_place", "time_us", "algbw_gbytes_per_s", "busbw_gbytes_per_s",
    "wrong_values", "time_min_us", "time_max_us", "time_p99_us", "time_cv_percent",
    "iteration_times_us", "process_times_us",
)  # fmt: skip
_IMPOSSIBLE: Final = re.compile(r"no algorithm/protocol available", re.IGNORECASE)
_FAILURE: Final = re.compile(
    r"(Test \w+ failure|error|NCCL WARN|DYNAMICCL:|invalid)", re.IGNORECASE
)
_CALL: Final = re.compile(r" Bytes -> ")

# --- What it printed ---


def is_row(line: str) -> bool:
    """Whether a line is a result row, which counts as progress."""
    return _ROW.match(line) is not None


def read_rows(lines: Sequence[str], json: Path, *, sizes: Sequence[int]) -> list[list[Row]]:
    """The rows of each block of a launch, in order: out-of-place, and in-place where there is one.

    `lines` is everything printed, `json` where JSON was asked for (it need not be there), `sizes`
    are those of one walk in bytes, as printed.
    """
    blocks = _believed(_text_blocks(lines), sizes)
    from_json = _believed(_json_blocks(json), sizes)
    if not from_json or len(from_json) < len(blocks):
        return blocks
    # The JSON output has no release of nccl-tests.
    release = blocks[0][0].get("nccl_tests_version") if blocks else None
    for half in (half for block in from_json for half in block):
        if release is not None:
            half.setdefault("nccl_tests_version", release)
    return from_json


def environment_in(blocks: Sequence[Sequence[Row]]) -> Row:
    """The environment columns that the benchmark's output names."""
    known = blocks[0][0] if blocks else {}
    return {name: known[name] for name in _OF_A_LAUNCH if known.get(name)}


def last_words(lines: Sequence[str]) -> str:
    """The error lines of a failed benchmark, else its last lines, and a launcher's first.

    That one names the node that failed.
    """
    told = [line.strip() for line in lines if line.strip() and not is_row(line)]
    launchers = [line for line in told if _LAUNCHERS.match(line)]
    # Comment lines are the table's header, which does not explain a failure.
    own = [line for line in told if not _LAUNCHERS.match(line) and not line.startswith("#")]
    words = ([line for line in own if _FAILURE.search(line)] or own)[-3:]
    words += launchers[:1] if words else launchers[:3]
    return " | ".join(words)[:600] or "no output"


def is_impossible(lines: Sequence[str]) -> bool:
    """Whether NCCL logged that no such combination exists (2.24 and later, `src/enqueue.cc`)."""
    return any(_IMPOSSIBLE.search(line) for line in lines)


def _text_blocks(lines: Sequence[str]) -> list[list[Row]]:
    report = FileReport("output", Source.NCCL_TESTS_TEXT.value)
    found = TextRuns(report)
    # An unreadable row (torn, or without a time) still takes its place in the walk over sizes.
    blocks = list(found.rows("\n".join(lines).splitlines()))
    return [
        [_measured(half, found.runs[half[RUN]], report.format) for half in row] for row in blocks
    ]


def _json_blocks(path: Path) -> list[list[Row]]:
    if not path.is_file():
        return []
    report = FileReport(str(path), Source.NCCL_TESTS_JSON.value)
    try:
        halves, run = read_json(path, report)
    except DataError:
        return []  # cut off by a crash: the text has what was measured
    blocks: list[list[Row]] = []
    for half in halves if not report.num_rejected else ():
        if not half["in_place"]:
            blocks.append([])
        if blocks:
            blocks[-1].append(_measured(half, run, report.format))
    return blocks


def _measured(half: Row, run: Run, source: str) -> Row:
    """What is kept of a half and of its run; what two lines say differently is not known."""
    status = Status.WRONG_VALUES if half["wrong_values"] else Status.OK
    told = ({line.gpu for line in run.ranks if line.gpu}, run.nccl.versions, run.tests_versions)
    facts = {
        name: next(iter(values))
        for name, values in zip(_OF_A_LAUNCH, told, strict=True)
        if len(values) == 1
    }
    kept = {name: half[name] for name in _OF_A_HALF if half.get(name) is not None}
    numbers = {k: v for k, v in kept.items() if not isinstance(v, float) or math.isfinite(v)}
    return {"source": source, "status": status.value, **facts, **numbers}


def _believed(blocks: Sequence[list[Row]], sizes: Sequence[int]) -> list[list[Row]]:
    """The blocks before the first one that is torn or not of the expected size."""
    good: list[list[Row]] = []
    for number, block in enumerate(blocks):
        if not block or block[0]["size_bytes"] != sizes[number % len(sizes)]:
            break
        good.append(block)
    return good


# --- Several communicators at once ---


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
    nodes = {found.get(members) for members in setting.comms}
    if nodes == {setting.num_nodes}:
        return None
    return (
        f"nccl-tests made other communicators than split '{setting.split}' asks for "
        f"({', '.join(f'{len(group)} ranks on {on} hosts' for group, on in found.items())}); build "
        "it with MPI, and start ranks node by node (srun --distribution=block, mpirun --map-by ppr)"
    )


# --- What ran ---


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
    logs: Iterable[Iterable[str]],
    grid: Grid,
    *,
    num_ranks: int,
    warmup_calls: int,
    calls_per_block: int,
) -> list[Choice | None]:
    """What ran in each block of `grid`, where the logs of all communicators agree.

    NCCL prints one line for each call of rank 0, in the order of the calls (NCCL 2.20 and later;
    channels from 2.24 on). That order is known (warm-up, then block by block), so every line
    belongs to one trial. None where a block's calls differ or are unnamed; shorter than the grid
    where a log ends early (a crash), and empty where it is not one of these calls.
    """
    each = []
    for log in logs:
        calls = list(logged_calls(log))[warmup_calls:]
        found: list[Choice | None] = []
        # With a single size nothing else reveals a miscount of calls.
        whole = len(calls) <= len(grid.blocks) * calls_per_block
        for number in range(len(grid.blocks) if whole else 0):
            wanted = grid.benchmark_bytes[number % len(grid.benchmark_bytes)]
            part = calls[number * calls_per_block : (number + 1) * calls_per_block]
            if len(part) < calls_per_block:
                break
            if any(call.whole_bytes(num_ranks) != wanted for call in part):
                break
            one = part[0].choice
            is_known = one is not None and all(call.choice == one for call in part)
            found.append([*one] if one is not None and is_known else None)
        each.append(found)
    blocks = zip(*each, strict=False)
    return [block[0] if all(one == block[0] for one in block) else None for block in blocks]


# --- NCCL's own costs ---


def keep_costs(out: Path, file: SweepFile, launch: Launch, log: Sequence[str]) -> None:
    """Keep the cost table of a log's TUNING section as a part of `costs`, if it holds just one."""
    nccl, set_up = NcclLog(), [line for line in log if not _CALL.search(line)]
    for line in set_up:
        nccl.note(line)
    table = nccl.cost_table()
    if table is not None:
        known = trial_row(file, launch, launch.trials[0])
        gpus = {rank.gpu for rank in rank_lines(set_up) if rank.gpu}
        for column, values in (("gpu", gpus), ("nccl_version", nccl.versions)):
            known[column] = values.pop() if len(values) == 1 else None
        write_costs(out, table, known, program="run")
