"""The shell of the commands, for tests of `evaluate` that type them."""

from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
