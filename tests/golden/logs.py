"""What `dynamiccl-collect import` makes of each log, CSV and trace that we have."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Final

import pytest

from tests.golden.command import dynamiccl
from tests.golden.golden import Golden, tables
from tests.published import COPIES, SAMPLE, WHOLE, unpacked

#: Rows in the order of their lines.
_ORDER: Final = (
    *("source_file", "source_line", "rank", "step", "group", "group_sequence", "timestamp"),
    *("collective", "algorithm", "protocol", "run", "size_bytes", "in_place", "repeat", "time_us"),
)
#: Where a log was, and what follows from it.
_PLACES: Final = ("system", "sweep")
_COUNTS: Final = (
    *("rows_read", "measurements_written", "calls_written", "calls_timed", "rank_records"),
    *("steps_written", "untimed", "dropped", "duplicates", "already_there"),
)
_OF_A_FILE: Final = ("format", "dropped", "rejected", "remarks", "costs")


def imported(
    directory: Path, paths: Iterable[Path], *options: str, without: Iterable[str] = _PLACES
) -> dict[str, Any]:
    """Exit code, report and tables of one import of its own into `directory`."""
    directory.mkdir(parents=True, exist_ok=True)
    words = ("import", *paths, "--out", "data", "--system", "box", "--json", *options)
    code, report = dynamiccl("collect", *words, directory=directory)
    if code != 0:
        return {"exit": code}
    files = {Path(one["path"]).name: {k: one[k] for k in _OF_A_FILE} for one in report["files"]}
    return {
        "counts": {key: report[key] for key in _COUNTS},
        "rejected": len(report["rejected"]),
        "skipped": [Path(path).name for path in report["skipped"]],
        "files": files,
        "tables": tables(directory / "data", _ORDER, without),
    }


def _alone(folder: Path, *patterns: str, but: Path | None = None) -> Callable[[Path], Any]:
    """Imports every file alone; skips where the folder is not here."""

    def make(directory: Path) -> Any:
        if not folder.is_dir():
            pytest.skip(f"{folder} is not here")
        found = sorted(path for pattern in patterns for path in folder.glob(pattern))
        wanted = [path for path in found if but is None or not (but / path.name).is_file()]
        sweep = ("--sweep", "golden")
        return {
            path.name: imported(directory / path.name, [unpacked(path, directory)], *sweep)
            for path in wanted
        }

    return make


def _together(folder: Path, *names: str) -> Callable[[Path], Any]:
    """Imports files, or all of a folder, in one go; twice, since the second adds nothing."""

    def make(directory: Path) -> Any:
        paths = [folder / name for name in names] if names else [folder]
        if not all(path.exists() for path in paths):
            pytest.skip(f"{folder} is not here")
        first = imported(directory, paths)
        again = imported(directory, paths)
        return {"first": first, "again": {k: v for k, v in again.items() if k != "tables"}}

    return make


def _told(directory: Path) -> Any:
    """A log that says little, and the options that say the rest."""
    log = COPIES / "logs" / "ebpf_allgather_ll_small.log"
    options = (
        *("--sweep", "told", "--ranks", "2", "--nodes", "2", "--nccl-version", "2.29.7"),
        *("--gpu", "NVIDIA X", "--algorithm", "Ring"),
        *("--protocol", "LL", "--channels", "4", "--systems", str(SAMPLE / "systems.toml")),
    )
    return imported(directory, [log], *options, without=())


#: Calls files (format 1) and Inspector's dumps of two ranks; one is cut off, one lacks a call.
_INPUTS: Final = Path(__file__).with_name("inputs")
_CASES: Final = WHOLE / "public-cases"
_TRACES: Final = ("hta_*", "param_dlrm_kineto*")

#: The rows of each log were counted by hand and with `grep -cE` over the row pattern, before there
#: was a parser; the numbers of the data's own README agree. It says two rows of size 0 for all six
#: superbenchmark files; three of them have five, since AllGather, ReduceScatter and AlltoAll round
#: the size down per rank. Logs without a row are refused: tests/collect/test_damage.py says how.
GOLDENS: Final = (
    Golden("logs-abci", _alone(COPIES / "logs", "abci_*")),
    Golden("logs-superbenchmark", _alone(COPIES / "logs", "superbenchmark_*")),
    Golden("logs-text", _alone(COPIES / "logs", "aws_*", "cscs_*", "ebpf_*")),
    Golden("logs-json", _alone(COPIES, "*.json")),
    Golden("logs-told", _told),
    Golden("logs-csv", _alone(SAMPLE, "*.csv")),
    Golden("logs-traces", _alone(COPIES / "traces", *_TRACES)),
    Golden("logs-recorder", _together(_INPUTS / "recorder")),
    Golden("logs-inspector", _together(_INPUTS / "inspector")),
    Golden("logs-shared_text", _alone(WHOLE / "logs", "*", but=COPIES / "logs")),
    Golden("logs-shared_csv", _alone(WHOLE / "sweeps", "*.csv", but=SAMPLE)),
    Golden("logs-shared_traces", _alone(WHOLE / "traces", *_TRACES)),
    Golden("logs-public_cases", _alone(_CASES, "*.[!m]*")),
    Golden("logs-public_costs", _together(_CASES, "costs_default.log", "costs_forced_tree.log")),
)
