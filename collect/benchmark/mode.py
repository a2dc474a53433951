"""Whether one process measures many configs (sweep mode), or each config has its own process."""

import logging
from collections.abc import Iterable
from pathlib import Path

from dynamiccl.collect.benchmark.programs import Program
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.errors import MachineError
from dynamiccl.nccl import TUNER_ABI_SINCE, NcclVersion

_log = logging.getLogger(__name__)


def can_play(file: SweepFile, plugin: Path | None, programs: Iterable[Program]) -> bool:
    """Whether sweep mode is possible: the plugin plays a schedule of configs in one process.

    Raises MachineError where the sweep wants that and it cannot be.
    """
    wish = file.runner.mode
    if wish == "processes":
        return False
    obstacle = _obstacle(file, plugin, programs)
    if obstacle is None:
        return True
    if wish == "sweep":
        raise MachineError(f"runner mode 'sweep' cannot work: {obstacle}")
    _log.warning("one process for each config, since the sweep mode cannot work: %s", obstacle)
    return False


def _obstacle(file: SweepFile, plugin: Path | None, programs: Iterable[Program]) -> str | None:
    if plugin is None:
        return "there is no tuner plugin; build it with 'make plugin', or set runner.plugin"
    version = file.nccl_version
    if version is not None and NcclVersion.parse(version) < TUNER_ABI_SINCE[3]:
        return f"it needs NCCL {TUNER_ABI_SINCE[3]} and this is {version}"
    without = [p.path for p in programs if not p.has_cycles]
    return f"{without[0]} has no option -N; build nccl-tests 2.13 or later" if without else None
