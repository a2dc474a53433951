"""Runs the same checks inside the sweep's container."""

import json
import sys
from pathlib import Path
from typing import Final

from dynamiccl.checks import Check, Verdict
from dynamiccl.collect.launch import directory_inside
from dynamiccl.collect.launchers import LauncherSettings, Ranks, command, map_into_container
from dynamiccl.collect.process import Limits, run_process
from dynamiccl.errors import InvalidSweep, MachineError

#: A first start pulls the image.
_START_S: Final = 900.0
_NAME: Final = "inside the container"


def check_inside(
    sweep_file: Path, launcher: LauncherSettings, nccl_tests_dir: Path | None
) -> list[Check]:
    """Run `doctor` in the container on one node, and return what it found.

    Args:
        sweep_file: the sweep; it must lie under a mount, as our Python must.
        launcher: how a rank is started.
        nccl_tests_dir: where the benchmark is, on the host under a mount or inside the image.
    """
    container = launcher.container
    options: tuple[str, ...] = ()
    if nccl_tests_dir is not None and container is not None:
        options = ("--nccl-tests-dir", directory_inside(nccl_tests_dir, container))
    try:
        python = map_into_container(sys.executable, container)
        sweep = map_into_container(str(sweep_file.resolve()), container)
        argv = (python, "-P", "-m", "dynamiccl.collect.cli", "doctor", sweep, *options)
        started = command(Ranks((*argv, "--inside", "--json")), launcher)
        done = run_process(started, Limits(_START_S, _START_S))
    except InvalidSweep as error:
        return [Check(_NAME, Verdict.UNKNOWN, str(error), "mount our virtual environment too")]
    except MachineError as error:
        return [Check(_NAME, Verdict.FAIL, str(error), "start the container by hand")]
    text = done.output
    begin, end = text.find("["), text.rfind("]")
    try:
        found = json.loads(text[begin : end + 1])
        return [Check(**{**one, "name": f"{_NAME}: {one['name']}"}) for one in found]
    except (ValueError, TypeError, KeyError):
        said = " | ".join(text.strip().splitlines()[-3:]) or "nothing"
        return [Check(_NAME, Verdict.FAIL, f"output of doctor: {said}", f"try: {started.text}")]
