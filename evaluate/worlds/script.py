"""An executable as an entry: `SCRIPT TRAIN_DIR QUESTIONS.csv ANSWERS.csv` for each draw."""

import os
import signal
import subprocess
from pathlib import Path
from typing import Final

from dynamiccl.errors import MachineError
from dynamiccl.evaluate.policies import Actions
from dynamiccl.evaluate.worlds.answers import read_answers
from dynamiccl.evaluate.worlds.draws import QUESTIONS_NAME, TRAIN_FOLDER, Draw

#: Characters of what a script printed last that an error shows.
_TAIL: Final = 300


def script_actions(script: Path, draw: Draw, folder: Path, limit_s: float) -> Actions:
    """(T,) actions from a script; its answers and output are kept in `folder`.

    Raises MachineError when it does not start, fails, or takes longer than `limit_s`, and what
    reading its answers raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    answers, log = folder / f"{draw.name}.raw.csv", folder / f"{draw.name}.log"
    answers.unlink(missing_ok=True)
    asked = (draw.folder / TRAIN_FOLDER, draw.folder / QUESTIONS_NAME, answers)
    command = [str(script.resolve()), *(str(path.resolve()) for path in asked)]
    with log.open("wb") as file:
        try:
            # A session of its own, so that what it starts ends with it.
            process = subprocess.Popen(
                command, stdout=file, stderr=file, stdin=subprocess.DEVNULL, start_new_session=True
            )
        except OSError as error:
            raise MachineError(
                f"{script} does not start: {error}; its first line says what runs it, for example "
                "#!/usr/bin/env python3"
            ) from error
    try:
        code = process.wait(limit_s)
    except subprocess.TimeoutExpired as error:
        raise MachineError(
            f"{script} had not answered {draw.name} after {limit_s:g} s; make it faster, or raise "
            f"--limit-s ({_said(log)})"
        ) from error
    finally:
        _end(process)
    if code != 0:
        raise MachineError(f"{script} ended with code {code} on {draw.name} ({_said(log)})")
    return read_answers(answers, draw)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a script and all processes that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # nothing of it is left
    process.wait()


def _said(log: Path) -> str:
    text = " ".join(log.read_text(encoding="utf-8", errors="replace").split())
    return f"{log} ends: {text[-_TAIL:]}" if text else "it printed nothing"
