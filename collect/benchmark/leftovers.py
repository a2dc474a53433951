"""The folder of a running launch, from which a resumed sweep recovers the rows of a killed one.

    WORK/launch-XXXXXXXX/
        launch.json    which launch it is, with its picks
        output.jsonl   its output so far: [seconds since the epoch, line], flushed line by line
        ...            its schedule, report and dumps

A folder is removed when the next launch begins: then its rows are in the journal. Folders found at
the start are of a killed run; they are used when the same launch with the same picks comes up
again, maybe later, since launches of a round run in random order. Nothing is synced to disk while
ranks measure: rows that the kernel had not written at a power failure are measured again.
"""

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TextIO

from dynamiccl.collect.benchmark.launching import ProcessOutput
from dynamiccl.collect.process import Line
from dynamiccl.collect.runner import Launch

_PREFIX: Final = "launch-"
_LAUNCH: Final = "launch.json"
_OUTPUT: Final = "output.jsonl"


class LaunchFolders:
    """The working folders of one runner's launches."""

    def __init__(self, work: Path) -> None:
        """Take the folder for all of them; it need not be there."""
        self._work = work
        self._before = sorted(work.glob(f"{_PREFIX}*"))
        self._done: list[Path] = []

    def begin(self, launch: Launch) -> Path:
        """Make a new folder for a launch; folders of earlier launches of this run are removed."""
        self._remove_done()
        self._work.mkdir(parents=True, exist_ok=True)
        # Another one each time: on NFS a file that a rank still has open keeps its folder.
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=self._work))
        self._done.append(folder)
        (folder / _LAUNCH).write_text(json.dumps(_identity(launch)), encoding="utf-8")
        return folder

    def left_over(self, launch: Launch) -> Path | None:
        """The folder of this launch from a killed run; None when there is none left."""
        for folder in self._before:
            if _is_of(folder, launch):
                self._before.remove(folder)
                self._done.append(folder)
                return folder
        return None

    def clear(self) -> None:
        """Remove all folders: their rows are in the journal by now."""
        self._done += self._before
        self._before = []
        self._remove_done()

    def _remove_done(self) -> None:
        for folder in self._done:
            shutil.rmtree(folder, ignore_errors=True)
        self._done = []


@contextmanager
def written_down(folder: Path) -> Iterator["OutputFile"]:
    """A context manager: the output file in `folder` that takes a launch's lines."""
    with (folder / _OUTPUT).open("w", encoding="utf-8") as file:
        yield OutputFile(file)


class OutputFile:
    """The output lines of a running launch, on disk."""

    def __init__(self, file: TextIO) -> None:
        """Take the open file."""
        self._file = file

    def take(self, line: Line) -> None:
        """Append one line; a full disk costs this copy and not the launch."""
        with suppress(OSError):
            self._file.write(json.dumps([line.arrived_s, line.text]) + "\n")
            self._file.flush()


def ran_before(folder: Path) -> ProcessOutput:
    """The output of a killed launch in `folder`, up to the first torn line."""
    ran = ProcessOutput(_began_s(folder))
    with (folder / _OUTPUT).open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                arrived_s, text = json.loads(line)
            except ValueError:
                break
            ran.take(Line(str(text), float(arrived_s)))
    return ran


def _identity(launch: Launch) -> dict[str, Any]:
    picks = [[pick.trial.key, pick.repeat] for pick in launch.picks]
    return {"launch": launch.id, "mode": launch.mode.value, "picks": picks}


def _is_of(folder: Path, launch: Launch) -> bool:
    try:
        found = json.loads((folder / _LAUNCH).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return bool(found == _identity(launch) and (folder / _OUTPUT).is_file())


def _began_s(folder: Path) -> float:
    return (folder / _LAUNCH).stat().st_mtime
