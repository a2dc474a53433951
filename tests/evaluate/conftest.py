"""What tests of `evaluate` share: the shell of the commands, and reports without their drawings."""

import pytest

from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """No figure is written, which takes half of a report's time; other tests look at them."""
    for name in ("best_configs", "changes", "crossover", "families", "learning", "regret"):
        monkeypatch.setattr(
            f"dynamiccl.evaluate.figures.{name}.svg_text", lambda _figure: "<svg></svg>"
        )
