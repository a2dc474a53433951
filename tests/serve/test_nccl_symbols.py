"""What the released NCCL asks of plugins, read off its library: which of ours it would take.

pip install nvidia-nccl-cu12==2.31.2      or NCCL_LIBRARIES=/path/libnccl.so.2[:...]
"""

import importlib.util
import os
import re
import subprocess
from pathlib import Path

import pytest

from dynamiccl.libraries import ADAPTIVE_NAME, TUNER_NAME


def nccl_libraries() -> list[Path]:
    named = [Path(path) for path in os.environ.get("NCCL_LIBRARIES", "").split(":") if path]
    nvidia = importlib.util.find_spec("nvidia")
    folders = nvidia.submodule_search_locations if nvidia is not None else None
    installed = [
        path for folder in folders or [] for path in Path(folder).glob("nccl/lib/lib*.so*")
    ]
    return [path for path in (*named, *installed) if path.is_file()]


LIBRARIES: list[Path | None] = [*nccl_libraries()] or [None]


@pytest.fixture(params=LIBRARIES, ids=lambda path: path and path.parts[-5])
def asked(request: pytest.FixtureRequest) -> str:
    """The names of plugins' symbols that it holds."""
    if request.param is None:
        pytest.skip("no NCCL: pip install nvidia-nccl-cu12, or set NCCL_LIBRARIES")
    names = re.findall(
        rb"\0(ncclTunerPlugin_v\d+|ncclProfiler_v\d+)(?=\0)", request.param.read_bytes()
    )
    return " ".join(sorted({name.decode() for name in names}))


def exported(library: Path) -> set[str]:
    listed = subprocess.run(
        ["nm", "-D", "--defined-only", str(library)], capture_output=True, text=True, check=True
    ).stdout
    return {line.split()[-1] for line in listed.splitlines()}


@pytest.mark.parametrize("name", [TUNER_NAME, ADAPTIVE_NAME])
def test_the_newest_tuner_that_it_asks_for_is_there(
    name: str, asked: str, plugin_path: Path
) -> None:
    """It takes the newest that it finds: before ours is one, somebody has to read what is new."""
    tuners = [symbol for symbol in asked.split() if "Tuner" in symbol]
    assert tuners[-1] in exported(plugin_path.with_name(name)), tuners


def test_one_of_its_profilers_is_there(asked: str, plugin_path: Path) -> None:
    """v7 (2.31 on) is not ours: v6 is taken in its place."""
    ours = exported(plugin_path.with_name(ADAPTIVE_NAME))
    assert {symbol for symbol in asked.split() if "Profiler" in symbol} & ours
