"""Injected faults of the stand-in: hangs, crashes, wrong values."""

import os
import resource
import signal
import time
from collections.abc import Mapping
from typing import NoReturn

from dynamiccl.nccl import Collective, Config
from tests.fakes.nccl_tests.model import Choice


def wants(
    environment: Mapping[str, str], name: str, collective: Collective, choice: Choice | None
) -> bool:
    """Whether FAKE_HANG, FAKE_CRASH or FAKE_WRONG names this call."""
    setting = environment.get(name)
    if not setting:
        return False
    key, _, only = setting.partition("@")
    if only and Collective.parse(only) is not collective:
        return False
    return key in _keys(choice)


def _keys(choice: Choice | None) -> set[str]:
    if choice is None:
        return {"ABSTAIN"}
    configs = [
        Config(*choice.cell, channels, chunk)
        for channels in (None, choice.num_channels, choice.asked_channels)
        for chunk in (None, choice.chunk_bytes)
    ]
    return {config.key for config in configs} | (set() if choice.requested else {"ABSTAIN"})


def slow_start(environment: Mapping[str, str]) -> None:
    """Wait as long as FAKE_SLOW_START says."""
    time.sleep(float(environment.get("FAKE_SLOW_START", "0")))


#: How a wild pointer ends a process.
SEGMENTATION_FAULT = signal.SIGSEGV


def hang() -> NoReturn:
    """Never return."""
    while True:
        signal.pause()


def die(number: signal.Signals) -> NoReturn:
    """End by a signal to oneself, without a core file; buffered output is lost."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(number, signal.SIG_DFL)
    os.kill(os.getpid(), number)
    hang()
