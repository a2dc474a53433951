"""Shared by tests of `evaluate`: the shell fixture, and reports without figures."""

import pytest

from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Skip drawing figures, which takes half of a report's time; other tests cover them."""
    figures = [f"figures.{name}" for name in ("changes", "families")]
    for name in (*figures, "report", "systems", "training"):
        monkeypatch.setattr(f"dynamiccl.evaluate.{name}.svg_text", lambda _figure: "<svg></svg>")
