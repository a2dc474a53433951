"""Shared by tests of `evaluate`: the shell fixture."""

from tests.cli.conftest import shell_fixture as shell_fixture  # noqa: PLC0414
