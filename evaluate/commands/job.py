"""`dynamiccl-evaluate job`: what a job would gain, from its own calls."""

from pathlib import Path
from typing import Annotated, Any

import polars as pl
import typer

from dynamiccl import cli
from dynamiccl.datasets.objective import SmPrice
from dynamiccl.train import DEFAULT_TRACKING_URI
from dynamiccl.train.commands.options import Json, RunStore


def job_command(
    traces: Annotated[
        list[Path],
        typer.Argument(metavar="CALLS...", help="Traces of a job, or a data directory with calls."),
    ],
    data: Annotated[Path, typer.Option(help="Data directory with a sweep of the job's machines.")],
    policy: Annotated[
        str | None,
        typer.Option(metavar="RUN_OR_ARTIFACT", help="What this policy saves, beside the table."),
    ] = None,
    system: Annotated[
        str | None, typer.Option(help="Which of the systems in --data, where it holds several.")
    ] = None,
    ranks_per_node: Annotated[
        int | None,
        typer.Option(help="GPUs of a node of the job, where the sweep used other nodes.", min=1),
    ] = None,
    sm_price: SmPrice = 0.0,
    out: Annotated[
        Path | None,
        typer.Option(help="For job.html, job.json and cover.toml, the sweep of what is missing."),
    ] = None,
    tracking_uri: RunStore = DEFAULT_TRACKING_URI,
    as_json: Json = False,
) -> None:
    """What a job would gain under a policy or the best table, from its own calls.

    The verdict is gain, nothing or cannot-tell; exit code 0 for all three. A simulated sweep
    (run --runner simulator) tells it, too, and is marked as modelled.

    Example: dynamiccl-evaluate job traces --data data --out job
    Example: dynamiccl-evaluate job calls --data data --policy artifact --sm-price 0.8
    """
    with cli.working("reading traces"):
        from dynamiccl.datasets.store import read
        from dynamiccl.evaluate.job.answer import answer, policy_choice
        from dynamiccl.evaluate.job.calls import read_job
        from dynamiccl.evaluate.job.gains import Measured
        from dynamiccl.evaluate.page import tell, write_page
        from dynamiccl.train.policy import TorchPolicy
        from dynamiccl.train.tracking import policy_directory

        rows = read(data)
        of_system = rows if system is None else rows.filter(pl.col("system") == system)
        most: Any = of_system["ranks_per_node"].max()
        job = read_job(traces, ranks_per_node or most or 1)
        source = Measured(rows, system, job.nccl_version, sm_price / 100.0)
        choose = manifest = None
        if policy is not None:
            loaded = TorchPolicy.load(policy_directory(policy, tracking_uri))
            choose, manifest = policy_choice(loaded, source.system), loaded.manifest
        told = answer(job, source, choose, manifest).told
    page = None
    if out is not None:
        page = str(write_page(out, "job", told, {"told": told, "names": traces}))
        if told["sweep"]:
            (out / "cover.toml").write_text(told["sweep"] + "\n", encoding="utf-8")
    tell("job", {"told": told, "page": page}, {**told, "page": page}, as_json=as_json)
