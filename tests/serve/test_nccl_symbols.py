"""What the released NCCL asks of plugins, read off its library: which of ours it would take.

pip install nvidia-nccl-cu12==2.31.2      or one in LD_LIBRARY_PATH
"""

import re
import subprocess
from pathlib import Path

import pytest

from dynamiccl.doctor import Machine
from dynamiccl.libraries import ADAPTIVE_NAME, TUNER_NAME
from dynamiccl.serve.build import nccl_libraries

LIBRARIES: list[str | None] = [*nccl_libraries(Machine())] or [None]


@pytest.fixture(params=LIBRARIES)
def asked(request: pytest.FixtureRequest) -> str:
    """The names of plugins' symbols that it holds."""
    if request.param is None:
        pytest.skip("no NCCL: pip install nvidia-nccl-cu12")
    names = re.findall(
        rb"\0(ncclTunerPlugin_v\d+|ncclProfiler_v\d+)(?=\0)", Path(request.param).read_bytes()
    )
    return " ".join(sorted({name.decode() for name in names}))


def exported(library: Path) -> set[str]:
    command = ["nm", "-D", "--defined-only", str(library)]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return {line.split()[-1] for line in listed.splitlines()}


def test_the_newest_tuner_and_one_of_the_profilers_that_it_asks_for_are_there(
    asked: str, plugin_path: Path
) -> None:
    """It takes the newest that it finds: before ours is one, somebody has to read what is new.

    A profiler of v7 (2.31 on) is not ours: v6 is taken in its place.
    """
    tuners = [symbol for symbol in asked.split() if "Tuner" in symbol]
    for name in (TUNER_NAME, ADAPTIVE_NAME):
        ours = exported(plugin_path.with_name(name))
        assert tuners[-1] in ours, tuners
    assert {symbol for symbol in asked.split() if "Profiler" in symbol} & ours
