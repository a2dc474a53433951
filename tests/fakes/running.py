"""Runs the stand-in's programs from a test, in a clean environment."""

import os
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

#: Long enough for a loaded machine; a test that waits for a hang sets its own.
TIMEOUT_S = 60


@dataclass(frozen=True, slots=True)
class StandIn:
    """A folder of programs; `run` runs one."""

    folder: Path

    def run(
        self,
        program: str,
        *arguments: str,
        settings: Mapping[str, str] | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> subprocess.CompletedProcess[str]:
        """One program, reproducible unless FAKE_LAUNCH is set; raises TimeoutExpired."""
        return subprocess.run(
            [str(self.folder / program), *arguments],
            cwd=self.folder,
            env={"PATH": os.environ["PATH"], "FAKE_LAUNCH": "0", **(settings or {})},
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )

    def output(
        self, program: str, *arguments: str, settings: Mapping[str, str] | None = None
    ) -> str:
        """What a run that succeeds prints."""
        done = self.run(program, *arguments, settings=settings)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
