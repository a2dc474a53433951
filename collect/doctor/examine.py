"""Runs all checks, in the order in which a sweep would need what they look at."""

from collections.abc import Callable, Iterable
from typing import Final

from dynamiccl.checks import Check
from dynamiccl.collect.doctor.benchmark import check_benchmark
from dynamiccl.collect.doctor.cluster import check_cluster
from dynamiccl.collect.doctor.context import Context
from dynamiccl.collect.doctor.gpus import check_gpus
from dynamiccl.collect.doctor.host import check_host
from dynamiccl.collect.doctor.library import check_library
from dynamiccl.collect.doctor.network import check_network
from dynamiccl.collect.doctor.plugins import check_plugins
from dynamiccl.collect.doctor.settings import check_settings
from dynamiccl.machine import Machine

CHECKS: Final[tuple[Callable[[Machine, Context], Iterable[Check]], ...]] = (
    check_benchmark,
    check_library,
    check_plugins,
    check_settings,
    check_gpus,
    check_network,
    check_cluster,
    check_host,
)


def run_checks(machine: Machine, context: Context) -> list[Check]:
    """All checks of `machine` for a sweep with the needs `context`."""
    return [check for examine in CHECKS for check in examine(machine, context)]
