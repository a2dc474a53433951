"""All goldens: what the modules of this folder have in `GOLDENS`, an area each."""

import pkgutil
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Final

from tests.golden.golden import Golden


def _found() -> Iterator[Golden]:
    for module in sorted(m.name for m in pkgutil.iter_modules([str(Path(__file__).parent)])):
        if module not in {"__main__", "registry", "test_golden"}:
            area = import_module(f"tests.golden.{module}")
            yield from getattr(area, "GOLDENS", ())


GOLDENS: Final = tuple(_found())
