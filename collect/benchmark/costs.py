"""Stores NCCL's cost table, which a read-back launch logs, in the table `costs`."""

from collections.abc import Iterable
from pathlib import Path

from dynamiccl.collect.benchmark.topology import set_up_lines
from dynamiccl.collect.nccl_tests.cost_table import write_costs
from dynamiccl.collect.nccl_tests.facts import RunFacts
from dynamiccl.collect.runner import Launch
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.collect.trial_rows import pick_row


def keep_costs(out: Path, file: SweepFile, launch: Launch, lines: Iterable[str]) -> None:
    """Write the cost table from a launch's log and output; nothing unless exactly one is there.

    All collectives of a group log the same table: the same part, which is there once.
    """
    run = RunFacts(-1, "")
    for line in set_up_lines(lines):
        run.note(line, 0)
    table = run.costs.only()
    if table is None:
        return
    known = pick_row(file, launch, launch.picks[0])
    gpus = {rank.gpu for rank in run.ranks if rank.gpu}
    for name, values in (("gpu", gpus), ("nccl_version", run.nccl_versions)):
        known[name] = values.pop() if len(values) == 1 else None
    write_costs(out, table, known, program="run")
