"""`dynamiccl-deploy doctor`: whether NCCL loads the plugin here, whether it acts, what it costs."""

import os
import sys
from dataclasses import asdict
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated

import typer

from dynamiccl import cli
from dynamiccl.checks import exit_code, render
from dynamiccl.errors import MissingPath
from dynamiccl.libraries import TUNER_NAME, built, is_ours
from dynamiccl.machine import ThisMachine
from dynamiccl.serve.build import find_plugin
from dynamiccl.serve.commands.options import Json, folding_table, stdout
from dynamiccl.serve.doctor import Question, run_checks
from dynamiccl.serve.install import installed_plugin
from dynamiccl.serve.overhead import VARIANTS, WITHOUT, Overhead, measure
from dynamiccl.serve.preflight import compare, rank_line


def doctor_command(
    artifact: Annotated[
        Path | None,
        typer.Argument(metavar="[ARTIFACT]", help="Artifact; default DYNAMICCL_ARTIFACT."),
    ] = None,
    plugin: Annotated[
        Path | None,
        typer.Option(
            help="The plugin; default NCCL_TUNER_PLUGIN where ours, else installed or built."
        ),
    ] = None,
    nccl: Annotated[
        Path | None, typer.Option(help="The jobs' libnccl.so.2; default: what is found here.")
    ] = None,
    all_ranks: Annotated[
        bool, typer.Option("--all-ranks", help="As one rank of a launcher: say what this has.")
    ] = False,
    compare_file: Annotated[
        Path | None, typer.Option("--compare", help="Output of all ranks; - is standard input.")
    ] = None,
    overhead: Annotated[
        bool, typer.Option("--overhead", help="Measure what the plugin costs, on this node's GPUs.")
    ] = False,
    nccl_tests_dir: Annotated[
        Path, typer.Option(help="For --overhead: folder of the nccl-tests binaries.")
    ] = Path("nccl-tests/build"),
    rounds: Annotated[int, typer.Option(help="For --overhead: runs of each.", min=3)] = 7,
    as_json: Json = False,
) -> None:
    """Look at this machine before a job: what NCCL would load, and whether tables would act.

    Exit code 4 when something failed. With --all-ranks each rank of a launcher says what it has,
    and --compare prints the environment of a pre-flight when all have the same.

    Example: dynamiccl-deploy doctor out/artifact --nccl /opt/nccl/lib/libnccl.so.2
    Example: srun dynamiccl-deploy doctor --all-ranks out/artifact | dynamiccl-deploy doctor
    --compare -
    """
    if compare_file is not None:
        _compare(compare_file, as_json=as_json)
        return
    looked_at = artifact or _variable("DYNAMICCL_ARTIFACT")
    question = Question(_plugin(plugin, looked_at), looked_at, nccl)
    if all_ranks:
        print(rank_line(ThisMachine(), question), flush=True)
        return
    if overhead:
        with TemporaryDirectory(prefix="dynamiccl-calls-") as folder:
            found = find_plugin(question.plugin)
            _show_overhead(
                measure(ThisMachine(), found, nccl_tests_dir, Path(folder), rounds), as_json=as_json
            )
        return
    checks = run_checks(ThisMachine(), question)
    if as_json:
        cli.print_json([asdict(check) for check in checks])
    else:
        stdout.print(render(checks), soft_wrap=True, highlight=False, markup=False)
    raise typer.Exit(exit_code(checks))


def _plugin(named: Path | None, artifact: Path | None) -> Path:
    """The plugin to check: as named, of the environment, installed with the artifact, or built."""
    if named is not None:
        return named
    loaded = _variable("NCCL_TUNER_PLUGIN")
    if loaded and is_ours(str(loaded)):
        return loaded
    installed = None if artifact is None else installed_plugin(artifact)
    return installed or built(TUNER_NAME)


def _variable(name: str) -> Path | None:
    value = os.environ.get(name)
    return Path(value) if value else None


def _compare(file: Path, *, as_json: bool) -> None:
    if str(file) == "-":
        text = sys.stdin.read()
    elif file.is_file():
        text = file.read_text(encoding="utf-8", errors="replace")
    else:
        raise MissingPath("list of ranks", file, "give a file, or - for standard input")
    agreed = compare(text.splitlines())
    if as_json:
        cli.print_json(asdict(agreed))
        return
    artifact = agreed.artifact_sha256[:16]
    print(f"{agreed.num_ranks} ranks are alike: {agreed.system}, artifact {artifact}")


def _show_overhead(found: Overhead, *, as_json: bool) -> None:
    if as_json:
        cli.print_json(asdict(found))
        return
    table = folding_table("bytes", *(f"{variant} us" for variant in VARIANTS))
    for size, medians in found.medians_us.items():
        table.add_row(str(size), *(f"{medians[variant]:.2f}" for variant in VARIANTS))
    stdout.print(table)
    for cost in found.costs:
        stdout.print(
            f"{cost.variant}: {cost.median_percent:+.2f} % of the time {WITHOUT} "
            f"(95 % interval {cost.low_percent:+.2f} .. {cost.high_percent:+.2f}), "
            f"{found.num_gpus} GPUs, {found.num_rounds} rounds",
            soft_wrap=True,
            highlight=False,
        )
