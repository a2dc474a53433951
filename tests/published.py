"""Published measurements for tests.

All of it lies beside the checkout of whoever has it (`../shared/data`). What its licence lets us
pass on, and a test wants, is in tests/data too, so that a clone tests it; the rest is skipped.
"""

import tarfile
from pathlib import Path
from typing import Final

import pytest

ROOT: Final = Path(__file__).resolve().parents[1]
WHOLE: Final = ROOT.parent / "shared" / "data"
COPIES: Final = Path(__file__).with_name("data")
#: Sweeps that ship with the project.
SAMPLE: Final = ROOT / "datasets" / "sample"


def folder(name: str) -> Path:
    """`logs` or `model`: whole where it is, else what the repository has of it."""
    return WHOLE / name if (WHOLE / name).is_dir() else COPIES / name


def published(path: Path) -> Path:
    """The file; skips the test where it is not in the repository and not beside it."""
    if not path.is_file():
        pytest.skip(f"{path.name} may not be passed on, and {WHOLE} is not here")
    return path


def sweep(name: str) -> Path:
    """A tidy CSV of measured times; skips the test where it is not here."""
    shipped = SAMPLE / name
    return shipped if shipped.is_file() else published(WHOLE / "sweeps" / name)


def unpacked(path: Path, folder: Path) -> Path:
    """The directory below `folder` that an archive is unpacked into; another file itself."""
    if not path.name.endswith(".tar.gz"):
        return path
    below = folder / "unpacked" / path.name
    with tarfile.open(path) as archive:
        archive.extractall(below, filter="data")
    return below
