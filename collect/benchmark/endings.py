"""Why a launch ended early, and whether the config that was running is to blame."""

import logging
from collections.abc import Sequence

from dynamiccl.collect.benchmark.launching import ProcessOutput
from dynamiccl.collect.benchmark.output import is_impossible, last_words
from dynamiccl.collect.nodes import Health
from dynamiccl.collect.runner import Launch, LaunchMode, Pick, Quarantined
from dynamiccl.collect.sweep.settings import RunnerSettings
from dynamiccl.datasets.schema import Status

_log = logging.getLogger(__name__)


def what_happened(ran: ProcessOutput, limits: RunnerSettings) -> tuple[Status, str]:
    """Status and reason for the config that was running when a launch ended early."""
    finished = ran.finished
    assert finished is not None, "a launch that was asked to stop has no culprit"
    words = last_words(ran.texts)
    if finished.reason is not None:
        if ran.row_times:
            waited_s = limits.stall_timeout_s + ran.more_s
            return Status.TIMED_OUT, f"no new row for {waited_s:.3g} s"
        waited_s = limits.startup_timeout_s + ran.more_s
        return Status.TIMED_OUT, f"no row within {waited_s:.3g} s: {words}"
    status = Status.INFEASIBLE if is_impossible(ran.texts) else Status.FAILED
    return status, f"exit code {finished.returncode}: {words}"


class SecondChances:
    """Lets a config that ended a launch run once more before it is blamed: nodes fail too."""

    def __init__(self) -> None:
        self._taken: set[tuple[LaunchMode, str]] = set()

    def gives(
        self, launch: Launch, culprit: Pick, ran: ProcessOutput, limits: RunnerSettings
    ) -> bool:
        """Whether the config that was running gets another try; logs a warning if so."""
        status, reason = what_happened(ran, limits)
        key = (launch.mode, culprit.trial.key)
        if status is Status.INFEASIBLE or key in self._taken:
            return False
        self._taken.add(key)
        config = culprit.trial.config.key
        _log.warning("%s ended in %s (%s), which runs once more", launch.id, config, reason)
        return True


def suspect(
    launch: Launch, culprit: Pick, ran: ProcessOutput, limits: RunnerSettings
) -> Quarantined:
    """Quarantine a config that hung or crashed, and log a warning."""
    status, reason = what_happened(ran, limits)
    hung = "hung" if status is Status.TIMED_OUT else "crashed"
    _log.warning("%s: %s in %s (%s)", launch.id, hung, culprit.trial.config.key, reason)
    return Quarantined(culprit.trial, f"{hung} ({reason[:200]})")


def warn_of_unwell(launch: Launch, healths: Sequence[Health]) -> None:
    """Log how many blocks of a launch were measured on throttled or failing GPUs, if any."""
    if unwell := sum(bool(health.throttled or health.ecc_errors) for health in healths):
        _log.warning(
            "%s: heat, power or memory errors of GPUs in %d of %d blocks, whose times are not used",
            launch.id,
            unwell,
            len(healths),
        )
