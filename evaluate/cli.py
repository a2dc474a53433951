"""`dynamiccl-evaluate`: what a policy is worth, on sizes it never saw."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dynamiccl import cli
from dynamiccl.train import DEFAULT_TRACKING_URI

app = typer.Typer(
    help="Score policies against NCCL's default and simple baselines on held-out sizes.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
_stdout = Console()


def main() -> None:
    """Entry point of the console script."""
    cli.run(app)


@app.callback()
def _group() -> None:
    """Keep `report` a subcommand while it is the only one."""


@app.command("report")
def report_command(
    data: Annotated[Path, typer.Option(help="Data directory of dynamiccl-collect.")],
    policy: Annotated[
        list[str], typer.Option(metavar="RUN_OR_ARTIFACT", help="Run id, run directory, artifact.")
    ],
    out: Annotated[Path, typer.Option(help="Where results.parquet and report.html go.")],
    tracking_uri: Annotated[
        str, typer.Option(help="MLflow store that holds the run ids.")
    ] = DEFAULT_TRACKING_URI,
    as_json: Annotated[bool, typer.Option("--json", help="Write JSON to stdout.")] = False,
) -> None:
    """Score policies on the test size bins, cold, against the measured oracle.

    Example: dynamiccl-evaluate report --data out/data --policy RUN_ID --out out/report
    """
    # Checked before the heavy imports: a typo should not take five seconds to be told.
    from dynamiccl.datasets.store import part_paths

    part_paths(data)
    from dynamiccl.evaluate.page import HEADS, cells
    from dynamiccl.evaluate.report import POLICY_NAME, make_report
    from dynamiccl.train.tracking import policy_directory

    folders = [policy_directory(name, tracking_uri) for name in policy]
    names = [POLICY_NAME] if len(folders) == 1 else [f"policy-{i + 1}" for i in range(len(folders))]
    report = make_report(data, list(zip(names, folders, strict=True)), out)
    if as_json:
        cli.print_json(report.to_json())
        return
    wide = Console(width=max(_stdout.width, 170)) if not _stdout.is_terminal else _stdout
    for system in report.systems:
        band = "unknown" if system.band is None else f"{system.band:.2%}"
        mark = " (simulated)" if system.simulated else ""
        table = Table(title=f"{system.system}{mark}, noise band {band}")
        for index, head in enumerate(HEADS):
            table.add_column(head, no_wrap=index == 0)
        for summary in system.summaries:
            table.add_row(*cells(summary))
        wide.print(table)
        if system.beyond_noise:
            few = system.beyond_noise
            by_name = ", ".join(f"{each.policy} {each.mean:.2%}" for each in few)
            wide.print(
                f"where NCCL's default is beyond the noise band ({few[0].tasks} tasks), mean "
                f"regret: {by_name}",
                soft_wrap=True,
                highlight=False,
            )
        for line in system.verdicts:
            wide.print(line, soft_wrap=True, highlight=False)
        if system.unscored.height:
            wide.print(f"{system.unscored.height} tasks listed and not scored (see the page)")
    wide.print(f"{report.page}\n{report.results}", soft_wrap=True)


if __name__ == "__main__":
    main()
