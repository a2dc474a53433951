"""Makes measurement rows from the parsed output of a block."""

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from dynamiccl.collect.benchmark.blocks import Verdict
from dynamiccl.collect.benchmark.read_back import PlainChoice
from dynamiccl.collect.runner import Launch, Measured, Pick, Row
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.collect.trial_rows import lost_row, pick_row
from dynamiccl.datasets.schema import Source, Status


class RowMaker:
    """Makes rows, with the environment columns and read-back results known so far."""

    def __init__(self, file: SweepFile, environment: Mapping[str, Any]) -> None:
        """Take the sweep's settings and the environment columns that hold for all of it."""
        self._file = file
        self._environment = dict(environment)
        self.choices: dict[str, PlainChoice | None] = {}

    def learn(self, environment: Mapping[str, Any]) -> None:
        """Add environment columns."""
        self._environment.update(environment)

    def environment(self) -> Row:
        """The environment columns known so far."""
        known = {
            "source": Source.NCCL_TESTS_TEXT.value,
            "timestamp": datetime.now(UTC),
            "nccl_version": self._file.nccl_version,
        }
        return {**known, **self._environment}

    def lost(
        self, launch: Launch, pick: Pick, status: Status, reason: str, hosts: str | None
    ) -> Measured:
        """The single row of a pick that has no time."""
        row = {**self._base(launch, pick), "hosts": hosts}
        return Measured(pick, (lost_row(row, status, reason),))

    def measured(
        self,
        launch: Launch,
        pick: Pick,
        block: Sequence[Mapping[str, Any]],
        verdict: Verdict,
        known: Mapping[str, Any],
    ) -> Measured:
        """The rows of a block: one for each buffer placement, or one with the failure.

        `known` are columns of this block or launch alone.
        """
        base = {**self._base(launch, pick), **known, "actual_chunk_bytes": verdict.chunk_bytes}
        if verdict.status is not Status.OK:
            return Measured(pick, (lost_row(base, verdict.status, verdict.reason),))
        return Measured(pick, tuple(base | self._actual(pick) | _result(half) for half in block))

    def _base(self, launch: Launch, pick: Pick) -> dict[str, Any]:
        return {**pick_row(self._file, launch, pick), **self.environment()}

    def _actual(self, pick: Pick) -> dict[str, Any]:
        choice = self.choices.get(pick.trial.key)
        if choice is None:
            return {"verified": False}
        algorithm, protocol, channels = choice
        return {
            "actual_algorithm": algorithm,
            "actual_protocol": protocol,
            "actual_num_channels": channels,
            "verified": True,
        }


def _result(half: Mapping[str, Any]) -> dict[str, Any]:
    """The result columns of one half (in-place or out-of-place) of a block; checks wrong values."""
    if half.get("status") != Status.WRONG_VALUES.value:
        return dict(half)
    return {**half, "reason": f"{half.get('wrong_values')} wrong values"}
