"""The `decisions` table: what NCCL ran for each size, from a log without benchmark rows.

Where there are benchmark rows, each row has what ran for it (`actual_algorithm` and the others).
"""

from collections.abc import Mapping
from typing import Any

from dynamiccl.collect.nccl_tests.facts import RunFacts
from dynamiccl.collect.reports import FileReport, ImportOptions
from dynamiccl.datasets.schema import DECISIONS
from dynamiccl.nccl import Collective


def decision_rows(
    facts: RunFacts, known: Mapping[str, Any], options: ImportOptions, report: FileReport
) -> list[dict[str, Any]]:
    """Rows of `decisions` for the one group that `known` describes.

    None where its ranks are not known, or communicators differ in theirs: a line names neither.
    Sizes for which different things ran are left out, and the report says how many. Lines of NCCL
    2.20 to 2.22 do not name their collective: they are those of `options.collective`.
    """
    log = facts.tuning
    if not log.seen:
        return []
    if len(facts.nranks) > 1:
        sizes = ", ".join(map(str, sorted(facts.nranks)))
        report.remark(f"NCCL's decisions left out: communicators of {sizes} ranks made them")
        return []
    if known["num_ranks"] is None:
        report.remark("NCCL's decisions left out: say of how many ranks they are (--ranks)")
        return []
    named = {collective for collective, _, _ in log.seen if collective is not None}
    if len(named) < len({collective for collective, _, _ in log.seen}):
        if options.collective is None:
            report.remark(
                "NCCL's decisions left out: they name no collective, say which (--collective)"
            )
        else:
            named.add(Collective.parse(options.collective))
    shared = {name: known[name] for name in DECISIONS.names if name in known}
    rows = []
    for collective in sorted(named):
        choices, differing = log.resolve(collective, known["num_ranks"])
        if differing:
            report.remark(
                f"{collective.wire}: sizes for which NCCL ran different things, or none of its "
                f"configs, left out: {len(differing)}"
            )
        rows += [
            {
                **shared,
                "collective": collective.wire,
                "algorithm": choice.algorithm.wire,
                "protocol": choice.protocol.wire,
                "size_bytes": size_bytes,
                "num_channels": choice.num_channels,
            }
            for size_bytes, choice in sorted(choices.items())
        ]
    return rows
