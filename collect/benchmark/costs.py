"""Stores NCCL's cost table, which a read-back launch logs, in the table `costs`."""

from collections.abc import Iterable
from pathlib import Path

from dynamiccl.collect.benchmark.topology import set_up_lines
from dynamiccl.collect.nccl_log import NcclLog, write_costs
from dynamiccl.collect.output import rank_lines
from dynamiccl.collect.runner import Launch
from dynamiccl.collect.sweep.settings import SweepFile
from dynamiccl.collect.trial_rows import pick_row


def keep_costs(out: Path, file: SweepFile, launch: Launch, lines: Iterable[str]) -> None:
    """Write the cost table from a launch's log and output; nothing unless exactly one is there.

    All collectives of a group log the same table: the same part, which is there once.
    """
    log, set_up = NcclLog(), list(set_up_lines(lines))
    for line in set_up:
        log.note(line)
    table = log.cost_table()
    if table is None:
        return
    known = pick_row(file, launch, launch.picks[0])
    gpus = {rank.gpu for rank in rank_lines(set_up) if rank.gpu}
    for name, values in (("gpu", gpus), ("nccl_version", log.versions)):
        known[name] = values.pop() if len(values) == 1 else None
    write_costs(out, table, known, program="run")
