"""`dynamiccl-deploy ab`: the proof in the job."""

import json
import os
import random
import re
import shutil
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from dynamiccl import cli
from dynamiccl.datasets.manifest import AB_NAME, KILL_NAME
from dynamiccl.errors import UserError
from dynamiccl.serve.ab import EXIT_CODES, PROVEN, WORSE, Launch, conclude, launch, limit_s
from dynamiccl.serve.commands.options import Json
from dynamiccl.serve.doctor import DEFAULT_MODE
from dynamiccl.serve.install import RUN_NAME


def ab_command(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The job.")],
    home: Annotated[
        Path | None, typer.Option(help="Where 'install' put it; default DYNAMICCL_HOME or by PATH.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Launches of each kind.", min=1)] = 5,
    seconds: Annotated[float | None, typer.Option(help="End each launch then.", min=1)] = None,
    step_time: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="One group: a step's s, or ms where 'ms' is matched."),
    ] = None,
    worse: Annotated[float, typer.Option(help="Share slower that is borne.", min=0)] = WORSE,
    keep: Annotated[bool, typer.Option("--keep", help="Never switch the artifact off.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for outputs; default ab-TIME.")] = None,
    as_json: Json = False,
) -> None:
    """Launch a job in turns with DynamICCL and without, and compare its step times.

    Where it is slower or fails with us it stops and switches the artifact off (kill file); it stops
    where no table acts, too. The verdict is kept beside the artifact for 'doctor' (ab.json).
    Exit code 1: slower, or fails; 3: no table acted; 4: the job fails without us.

    Example: dynamiccl-deploy ab --home /shared/dynamiccl -- python train.py
    """
    wrapper = _wrapper(home)
    artifact = Path(os.environ.get("DYNAMICCL_ARTIFACT") or wrapper.parents[1] / "artifact")
    artifact = artifact.resolve()  # what is installed meanwhile is another one
    kill = Path(os.environ.get("DYNAMICCL_KILL_FILE") or artifact / KILL_NAME)
    out = out or Path(time.strftime("ab-%Y%m%d-%H%M%S"))
    _check(command, kill, step_time, out)
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "verdict": "unknown",
        "said": ["no pair was finished"],
        "command": command,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "out": str(out.absolute()),
        "worse": worse,
        "mode": os.environ.get("DYNAMICCL_MODE") or DEFAULT_MODE,
        "artifact": str(artifact),
        "switched_off": None,
        "launches": [],
    }
    _write(out, record)
    done: list[tuple[Launch, Launch]] = []
    with cli.interruptible(lambda: f"{record['said'][0]}; {out / AB_NAME} keeps it"):
        while len(done) < pairs and record["verdict"] not in EXIT_CODES:
            pair: dict[str, Launch] = {}
            # The first is without us: by its time a hang with us is told.
            arms = random.sample(("with", "without"), 2) if done else ["without", "with"]
            for arm in arms:
                number = 2 * len(done) + len(pair) + 1
                told = f"launch {number} of {2 * pairs}, {arm} DynamICCL"
                started = [str(wrapper), "--", *command] if arm == "with" else command
                with cli.working(told):
                    log = out / f"{number:02d}-{arm}.log"
                    known = [theirs for _, theirs in done] or list(pair.values())
                    limit = limit_s(seconds, known)
                    pair[arm] = launch(arm, artifact, started, log, limit, step_time)
                print(f"{told}: {pair[arm].in_short}", file=sys.stderr, flush=True)
            done.append((pair["with"], pair["without"]))
            record["verdict"], record["said"] = conclude(done, worse)
            record["launches"] += [asdict(each) for each in pair.values()]
            # Now, so that nothing is lost however often somebody presses Ctrl-C.
            _write(out, record)
    code = EXIT_CODES.get(record["verdict"], 0)
    try:
        if code == 1 and not keep:
            kill.touch()
            record["switched_off"] = str(kill)
            off = "switched off: new jobs make NCCL's own choice; on again: rm"
            record["said"].append(f"{off} {kill}")
        elif code == 1:
            record["said"].append(f"NOT switched off (--keep); to do so: touch {kill}")
        # What another mode shows says nothing of the tables, and what shows nothing hides nothing.
        is_proof = record["mode"] == DEFAULT_MODE and (code == 1 or record["verdict"] in PROVEN)
        if is_proof or record["switched_off"]:
            _write(artifact, record)
    except OSError as error:  # another user's installation
        record["said"].append(f"NOT WRITTEN: {error}")
    _write(out, record)
    if as_json:
        cli.print_json(record)
    else:
        print("\n".join([f"{record['verdict']}: {record['said'][0]}", *record["said"][1:]]))
        print(f"all of it: {out / AB_NAME}")
    raise typer.Exit(code)


def _wrapper(home: Path | None) -> Path:
    """dynamiccl-run of the installation that is named, else of the environment's."""
    named = home or os.environ.get("DYNAMICCL_HOME")
    folder = str(Path(named).absolute() / "bin") if named else None
    found = shutil.which(RUN_NAME, path=folder)
    if found is None:
        raise UserError(
            f"no {RUN_NAME} {f'in {folder}' if folder else 'on PATH'}; give --home DIR, where "
            "'dynamiccl-deploy install ARTIFACT --to DIR' put it"
        )
    return Path(found).resolve()


def _check(command: list[str], kill: Path, step_time: str | None, out: Path) -> None:
    """Raise UserError for what would not run, and for what an earlier outcome forbids."""
    if kill.exists():
        raise UserError(f"the artifact is switched off; on again: rm {kill}")
    if (out / AB_NAME).exists():
        raise UserError(f"--out {out} holds the outcome of another run; name another folder")
    if shutil.which(command[0]) is None:
        raise UserError(f"no program '{command[0]}'; give the job's command after --")
    try:
        groups = 1 if step_time is None else re.compile(step_time).groups
    except re.error as error:
        raise UserError(f"--step-time '{step_time}' is no regular expression: {error}") from error
    if groups < 1:
        raise UserError(f"--step-time '{step_time}' has no group; write one around the number")


def _write(folder: Path, record: dict[str, Any]) -> None:
    hidden = folder / f".{AB_NAME}"
    hidden.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    hidden.replace(folder / AB_NAME)
