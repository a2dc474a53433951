"""Checks of tuner and profiler plugins: ours, and a vendor's that ours would replace.

The reference default is measured with theirs; inside a sweep ours takes its place.
"""

import sys
from collections.abc import Iterator

from dynamiccl.checks import Check, fail, ok, unknown, warn
from dynamiccl.collect.doctor.context import Context
from dynamiccl.machine import Machine
from dynamiccl.nccl_setup import ASK_TUNER, ROLES, Origin, Role, find_other_plugin


def check_plugins(machine: Machine, context: Context) -> Iterator[Check]:
    """Check for other plugins, and for ours where the sweep needs it."""
    yield from (_other(machine, role) for role in ROLES)
    if context.wants_sweep_mode:
        yield _ours(machine, context)


def _other(machine: Machine, role: Role) -> Check:
    name = f"other {role.name}"
    found = find_other_plugin(machine, role)
    if found is None:
        return ok(name, "none")
    if found.origin is Origin.SWITCHED_OFF:
        return ok(name, f"none ({found.place})")
    return warn(
        name,
        found.place,
        "it is part of the untouched default, and ours takes its place inside a sweep: what it "
        "does shows in the difference of the two defaults",
    )


def _ours(machine: Machine, context: Context) -> Check:
    name = "our plugin"
    bad = fail if context.mode == "sweep" else warn
    otherwise = "" if context.mode == "sweep" else "; without it one process measures one config"
    if not machine.paths(context.plugin):
        return bad(
            name,
            f"none at {context.plugin}",
            f"build it with 'make plugin', or name it in runner.plugin{otherwise}",
        )
    ran = machine.run(sys.executable, "-c", ASK_TUNER, context.plugin)
    last = ran.output.strip().rpartition("\n")[2]
    if not ran.worked:
        return bad(
            name,
            f"{context.plugin} does not load: {last or 'no output'}",
            f"build it on a machine like the compute nodes, with 'make plugin'{otherwise}",
        )
    if not last:
        return bad(
            name, f"{context.plugin} exports no tuner", f"build it with 'make plugin'{otherwise}"
        )
    if not all(word.isdecimal() for word in last.split()):
        return unknown(name, f"{context.plugin} loads and says: {last}")
    return ok(name, f"{context.plugin} exports tuner {', '.join(f'v{k}' for k in last.split())}")
