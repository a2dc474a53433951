"""The real runner: one nccl-tests process for each trial, on this machine.

A config is forced by environment (`NCCL_ALGO`, `NCCL_PROTO`, `NCCL_MIN_CTAS` = `NCCL_MAX_CTAS`), as
NCCL's user guide has it. Launchers for clusters, the read-back pass and one process for the whole
grid are not here yet; the seam that they go behind is `Runner`.
"""

import os
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from dynamiccl.collect.nccl_tests.text import parse_text
from dynamiccl.collect.runner import Row
from dynamiccl.collect.sweep import SweepFile, Trial
from dynamiccl.collect.trial_rows import infeasible_row, trial_row
from dynamiccl.datasets.schema import Source, Statistic, Status
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective

#: Names of the nccl-tests binaries (v2.19.6, `src/`).
BINARIES: Final[Mapping[Collective, str]] = {
    Collective.AllReduce: "all_reduce_perf",
    Collective.AllGather: "all_gather_perf",
    Collective.ReduceScatter: "reduce_scatter_perf",
    Collective.Broadcast: "broadcast_perf",
    Collective.Reduce: "reduce_perf",
}
#: Seconds after which a trial counts as hung.
TIMEOUT_S: Final = 300.0


def build_command(binary: str, file: SweepFile, trial: Trial) -> list[str]:
    """The argument vector of one trial (pure)."""
    size = str(trial.size_bytes)
    return [
        binary,
        *("-b", size, "-e", size),
        *("-g", str(trial.ranks_per_node)),
        *("-n", str(file.iterations), "-w", str(file.warmup_iterations)),
        *("-d", file.datatype),
        *("-c", "1"),
    ]


def build_environment(trial: Trial) -> dict[str, str]:
    """The variables that force the trial's config; none for NCCL's default (pure)."""
    config = trial.config
    forced: dict[str, str] = {}
    if config.algorithm is not None:
        forced["NCCL_ALGO"] = config.algorithm.wire
    if config.protocol is not None:
        forced["NCCL_PROTO"] = config.protocol.wire
    if config.num_channels is not None:
        forced["NCCL_MIN_CTAS"] = forced["NCCL_MAX_CTAS"] = str(config.num_channels)
    return forced


@dataclass(frozen=True, slots=True)
class _Finished:
    returncode: int | None
    output: str


class NcclTestsRunner:
    """Runs nccl-tests binaries from `directory` (or PATH)."""

    def __init__(
        self, file: SweepFile, directory: Path | None = None, *, timeout_s: float = TIMEOUT_S
    ) -> None:
        """Take the sweep's settings, where the binaries are, and when a trial counts as hung."""
        self._file = file
        self._directory = directory
        self._timeout_s = timeout_s

    def check(self, trials: Sequence[Trial]) -> None:
        """Refuse groups of several nodes, what a benchmark cannot vary, and missing binaries."""
        for trial in trials:
            if trial.num_nodes != 1:
                raise InvalidSweep(
                    f"the nccl-tests runner starts one local process: groups must have num_nodes = "
                    f"1, not {trial.num_nodes}"
                )
            if trial.congestion:
                raise InvalidSweep(
                    "simulator.congestion_levels is for the simulator; the nccl-tests runner "
                    "measures the network as it is: leave it at [0.0]"
                )
        for collective in {trial.collective for trial in trials}:
            self._binary(collective)

    def measure(self, trial: Trial, *, run: str, repeat: int) -> list[Row]:
        """Run one trial; two rows (out-of-place, in-place), or one with the reason."""
        row: dict[str, Any] = trial_row(self._file, trial, run=run, repeat=repeat)
        row |= {"source": Source.NCCL_TESTS_TEXT.value, "timestamp": datetime.now(UTC)}
        if trial.infeasible is not None:
            return [infeasible_row(row, trial.infeasible)]
        argv = build_command(self._binary(trial.collective), self._file, trial)
        done = _execute(argv, build_environment(trial), self._timeout_s)
        if done.returncode is None:
            return [_lost(row, Status.TIMED_OUT, f"no end after {self._timeout_s:g} s")]
        measured = parse_text(done.output, where=argv[0], collective=trial.collective).rows
        if not measured:
            return [_lost(row, Status.FAILED, _last_words(done))]
        return [{**half, **row, **_result(half)} for half in measured]

    def _binary(self, collective: Collective) -> str:
        name = BINARIES.get(collective)
        if name is None:
            choices = ", ".join(c.wire for c in BINARIES)
            raise InvalidSweep(
                f"no nccl-tests binary tunes {collective.wire}; choose from {choices}"
            )
        found = shutil.which(name, path=str(self._directory) if self._directory else None)
        if found is None:
            place = str(self._directory) if self._directory else "PATH"
            raise MachineError(
                f"no executable {name} in {place}; build nccl-tests and give its build directory "
                "with --nccl-tests-dir, or use --runner simulator"
            )
        return found


def _result(half: Row) -> dict[str, Any]:
    # The size that ran, not the one asked: nccl-tests rounds it to whole elements a rank.
    kept = (
        "size_bytes",
        "in_place",
        "time_us",
        "algbw_gbytes_per_s",
        "busbw_gbytes_per_s",
        "wrong_values",
    )
    return {name: half.get(name) for name in (*kept, "status", "statistic")}


def _lost(row: dict[str, Any], status: Status, reason: str) -> dict[str, Any]:
    return {
        **row,
        "status": status.value,
        "reason": reason,
        "statistic": Statistic.NONE.value,
    }


def _last_words(done: _Finished) -> str:
    lines = [line for line in done.output.splitlines() if line.strip()]
    return f"exit code {done.returncode}: {' | '.join(lines[-3:]) or 'no output'}"


def _execute(argv: list[str], forced: Mapping[str, str], timeout_s: float) -> _Finished:
    # A process group of its own, so that a hung benchmark is ended with all its children.
    process = subprocess.Popen(
        argv,
        env={**os.environ, **forced},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        return _Finished(None, output)
    except BaseException:
        # Ctrl-C reaches us alone; without this the benchmark would go on and hold the GPUs.
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return _Finished(process.returncode, output)
