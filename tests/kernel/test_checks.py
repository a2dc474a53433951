import pytest

from dynamiccl.checks import Check, exit_code, fail, ok, render, unknown, warn


@pytest.mark.parametrize(
    ("checks", "code"),
    [
        ([], 0),
        ([ok("a", "x"), warn("b", "x", "y"), unknown("c", "x")], 0),
        ([ok("a", "x"), fail("b", "x", "y")], 4),
    ],
)
def test_only_a_failed_check_fails_the_command(checks: list[Check], code: int) -> None:
    assert exit_code(checks) == code


def test_advice_stands_under_its_finding() -> None:
    text = render([warn("clocks", "not locked", "lock them"), unknown("clock", "nobody says")])
    assert text.splitlines() == [
        "WARN  clocks: not locked",
        "      -> lock them",
        "?     clock: nobody says",
        "0 ok, 1 warnings, 0 failed, 1 unknown",
    ]
