from collections.abc import Callable

from dynamiccl.collect.telemetry.collectors import Group, Reading, Refused


class Log:
    def __init__(self) -> None:
        self.said: list[tuple[str, str, str]] = []

    def __call__(self, device: str, counter: str, error: str) -> None:
        self.said.append((device, counter, error))


def answers(*script: float | Refused) -> Callable[[], tuple[float, ...]]:
    """Gives these answers in turn, and fails the test when asked once more."""
    left = list(script)

    def ask() -> tuple[float, ...]:
        answer = left.pop(0)
        if isinstance(answer, Refused):
            raise answer
        return (answer,)

    return ask


NEVER = Refused("Not Supported", lasting=True)
NOT_NOW = Refused("Timeout", lasting=False)


def test_values_stand_in_the_order_of_the_columns() -> None:
    pair = Reading("gpu0", ("a", "b"), lambda: (1.0, 2.0))
    group = Group("fast", [pair, Reading("gpu1", ("a",), answers(0.0, 3.0))], Log())
    assert group.columns == [("gpu0", "a"), ("gpu0", "b"), ("gpu1", "a")]
    assert group.read() == [1.0, 2.0, 3.0]


def test_what_is_denied_at_first_is_no_column_and_not_asked_again() -> None:
    log = Log()
    group = Group("fast", [Reading("gpu0", ("a", "b"), answers(NEVER))], log)
    assert group.columns == []
    assert group.read() == []
    assert log.said == [("gpu0", "a", "Not Supported"), ("gpu0", "b", "Not Supported")]


def test_what_is_lost_later_is_said_once_and_not_asked_again() -> None:
    log = Log()
    group = Group("fast", [Reading("gpu0", ("a",), answers(1.0, 2.0, NEVER))], log)
    assert [group.read() for _ in range(4)] == [[2.0], [None], [None], [None]]
    assert log.said == [("gpu0", "a", "Not Supported")]


def test_a_passing_error_is_said_once_and_asked_again() -> None:
    log = Log()
    group = Group("fast", [Reading("gpu0", ("a",), answers(NOT_NOW, NOT_NOW, 5.0, NOT_NOW))], log)
    assert group.columns == [("gpu0", "a")]
    assert [group.read() for _ in range(3)] == [[None], [5.0], [None]]
    assert log.said == [("gpu0", "a", "Timeout")]
