"""Checks of NCCL_* variables from outside, and what they would distort."""

from collections.abc import Iterator
from typing import Final

from dynamiccl.checks import Check, fail, ok, warn
from dynamiccl.collect.doctor.context import Context
from dynamiccl.machine import Machine
from dynamiccl.nccl_setup import is_efficiency_policy, nccl_settings

#: What a tuner cannot overrule, as NCCL marks other choices unavailable (`src/graph/tuning.cc`).
#   NCCL_ALGO   forbids algorithms, whatever a tuner says; a sweep refuses it.
#   NCCL_PROTO  the same for protocols.
_BEATS_A_TUNER: Final = ("NCCL_ALGO", "NCCL_PROTO")
#: The number of channels is held within these (`src/graph/connect.cc`).
#   NCCL_MIN_CTAS       least number of channels, whatever a tuner says.
#   NCCL_MAX_CTAS       most channels, whatever a tuner says.
#   NCCL_MIN_NCHANNELS  the old name of NCCL_MIN_CTAS.
#   NCCL_MAX_NCHANNELS  the old name of NCCL_MAX_CTAS.
_LIMITS: Final = ("NCCL_MIN_CTAS", "NCCL_MAX_CTAS", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS")


def check_settings(machine: Machine, context: Context) -> Iterator[Check]:
    """List NCCL_* variables that are set, and those that the sweep cannot work with."""
    settings = nccl_settings(machine)
    shown = "; ".join(f"{name}={value} ({place})" for name, (value, place) in settings.items())
    if not settings:
        yield ok("NCCL settings", "none")
        return
    forced = [name for name in _BEATS_A_TUNER if name in settings]
    limits = [name for name in _LIMITS if name in settings]
    if forced:
        yield (fail if context.wants_sweep_mode else warn)(
            "NCCL settings",
            shown,
            f"{' and '.join(forced)} beat any tuner, and the default would not be NCCL's own: take "
            "them out of the environment and the files; a sweep forces configs itself",
        )
    elif limits:
        yield warn(
            "NCCL settings",
            shown,
            f"{' and '.join(limits)} limit the channels of the default and of every config: make "
            "it a launch profile, unless the jobs that you tune for run like this",
        )
    else:
        yield ok("NCCL settings", f"{shown}; they are part of the untouched environment")
    policy = settings.get("NCCL_CTA_POLICY")
    if policy and context.wants_sweep_mode and is_efficiency_policy(policy[0]):
        yield warn(
            "CTA policy",
            f"NCCL_CTA_POLICY={policy[0]}",
            "with any tuner loaded NCCL skips this policy's choice of NVLS (src/enqueue.cc, "
            "v2.30.7): compare with the untouched default only, which is measured without one",
        )
