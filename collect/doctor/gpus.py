"""Checks of GPUs by nvidia-smi: driver, modes, errors, clocks, and other processes on them."""

from collections.abc import Iterator, Sequence
from typing import Final

from dynamiccl.checks import Check, Verdict, fail, ok, unknown, warn
from dynamiccl.collect.doctor.context import Context
from dynamiccl.collect.sampler import ClockReason, is_slowed, reason_names
from dynamiccl.machine import Machine

#: nvidia-smi --help-query-gpu.
FACTS: Final = (
    "index",
    "name",
    "driver_version",
    "persistence_mode",
    "ecc.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
)
CLOCKS: Final = (
    "clocks.sm",
    "clocks.max.sm",
    "clocks_throttle_reasons.active",
    "utilization.gpu",
)
_FORMAT: Final = "--format=csv,noheader,nounits"
#: Shares GPUs for us, and is no job.
_SERVERS: Final = ("nvidia-cuda-mps-server",)
#: An idle GPU that runs this share of its top clock does not lower it: somebody fixed it.
_HELD: Final = 0.75


def query(kind: str, fields: Sequence[str]) -> tuple[str, ...]:
    """The argument vector of an nvidia-smi query."""
    return ("nvidia-smi", f"--query-{kind}={','.join(fields)}", _FORMAT)


def check_gpus(machine: Machine, context: Context) -> Iterator[Check]:
    """Check that there are enough GPUs, healthy, with steady clocks, and used by nobody else."""
    ran = machine.run(*query("gpu", FACTS))
    rows = _rows(ran.output, len(FACTS)) if ran.worked else []
    if not rows:
        yield _no_gpu(machine, context, ran.first_line)
        return
    columns = dict(zip(FACTS, zip(*rows, strict=True), strict=True))
    yield _gpus(columns, context)
    yield _persistence(columns["persistence_mode"])
    yield _ecc(columns["ecc.mode.current"], columns["ecc.errors.uncorrected.volatile.total"])
    yield _mig(columns["mig.mode.current"])
    yield from _clocks(machine)
    yield _other_processes(machine)


def _rows(output: str, width: int) -> list[tuple[str, ...]]:
    split = [tuple(cell.strip() for cell in line.split(",")) for line in output.splitlines()]
    return [row for row in split if len(row) == width]


def _no_gpu(machine: Machine, context: Context, said: str) -> Check:
    found = f"nvidia-smi shows no GPU: {said or 'no output'}"
    if context.is_distributed and "SLURM_JOB_ID" not in machine.env:
        return unknown(
            "GPUs",
            found,
            "is this a login node? run doctor where the ranks run, e.g. "
            "'srun -N1 dynamiccl-collect doctor'",
        )
    return fail("GPUs", found, "install the NVIDIA driver, or start on a node with GPUs")


def _gpus(columns: dict[str, tuple[str, ...]], context: Context) -> Check:
    names, count = columns["name"], len(columns["name"])
    found = f"{count} x {', '.join(dict.fromkeys(names))}, driver {columns['driver_version'][0]}"
    if count < context.ranks_per_node:
        return fail(
            "GPUs",
            found,
            f"the sweep wants {context.ranks_per_node} ranks per node: take smaller groups, or a "
            "node with as many GPUs",
        )
    if len(set(names)) > 1:
        return warn("GPUs", found, "unlike GPUs: each group is as slow as its slowest")
    if "traffic" in context.interference and count <= context.ranks_per_node:
        return fail(
            "GPUs",
            found,
            "interference 'traffic' needs GPUs that the trial leaves free: take groups with fewer "
            "ranks_per_node",
        )
    return ok("GPUs", found)


def _persistence(modes: Sequence[str]) -> Check:
    off = modes.count("Disabled")
    if off:
        return warn(
            "persistence mode",
            f"off on {off} of {len(modes)} GPUs",
            "the driver unloads between processes, which costs seconds each: 'nvidia-smi -pm 1' or "
            "nvidia-persistenced (root)",
        )
    return ok("persistence mode", f"on ({len(modes)} GPUs)")


def _ecc(modes: Sequence[str], errors: Sequence[str]) -> Check:
    counted = {f"gpu{i}": int(e) for i, e in enumerate(errors) if e.isdecimal() and int(e)}
    if counted:
        shown = ", ".join(f"{gpu}: {count}" for gpu, count in counted.items())
        return fail(
            "ECC", f"uncorrected memory errors since the driver loaded: {shown}",
            "do not measure on this node; have it drained and its GPUs reset or replaced",
        )  # fmt: skip
    if len(set(modes)) > 1:
        return warn(
            "ECC", f"modes differ: {', '.join(modes)}", "ECC costs bandwidth: make them alike"
        )
    return ok("ECC", f"{modes[0]}, no uncorrected errors")


def _mig(modes: Sequence[str]) -> Check:
    if "Enabled" in modes:
        return warn(
            "MIG",
            f"on ({modes.count('Enabled')} of {len(modes)} GPUs)",
            "rows are flagged and stay out of verdicts on the default; 'nvidia-smi -mig 0' (root)",
        )
    return ok("MIG", "off")


def _clocks(machine: Machine) -> Iterator[Check]:
    ran = machine.run(*query("gpu", CLOCKS))
    rows = _rows(ran.output, len(CLOCKS)) if ran.worked else []
    if not rows:
        yield unknown("clocks", f"nvidia-smi does not say: {ran.first_line or 'no output'}")
        return
    reasons = [int(row[2], 16) if row[2].startswith("0x") else 0 for row in rows]
    slowed = {f"gpu{i}": reason_names(r) for i, r in enumerate(reasons) if is_slowed(r)}
    if slowed:
        shown = "; ".join(f"{gpu}: {', '.join(names)}" for gpu, names in slowed.items())
        yield warn(
            "throttling", f"slowed right now: {shown}",
            "rows measured like this are flagged; see to cooling, power supply and power limit "
            "(nvidia-smi -q -d PERFORMANCE)",
        )  # fmt: skip
    verdicts = {_is_held(row, bits) for row, bits in zip(rows, reasons, strict=True)}
    clocks = ", ".join(f"{row[0]} of {row[1]} MHz" for row in rows[:8])
    if verdicts == {True}:
        yield ok("clocks", f"held ({clocks})")
    elif False in verdicts:
        yield warn(
            "clocks",
            f"not locked: they fall when idle ({clocks})",
            "the first calls of each launch run slower; lock them with 'nvidia-smi -lgc MHZ' "
            "(root), or leave it if the jobs that you tune for run like this",
        )
    else:
        yield unknown("clocks", f"busy GPUs do not show it ({clocks})")


def _is_held(row: Sequence[str], reasons: int) -> bool | None:
    """Whether a GPU's clock is fixed; None when it is busy, as any clock is high then."""
    if reasons & ClockReason.APPLICATIONS_CLOCKS_SETTING:
        return True
    if not (row[0].isdecimal() and row[1].isdecimal() and row[3] == "0"):
        return None
    return int(row[0]) >= _HELD * int(row[1])


def _other_processes(machine: Machine) -> Check:
    ran = machine.run(*query("compute-apps", ("pid", "process_name", "used_memory")))
    if not ran.worked:
        return Check("other jobs on the GPUs", Verdict.UNKNOWN, ran.first_line or "no output")
    rows = [row for row in _rows(ran.output, 3) if not row[1].endswith(_SERVERS)]
    if rows:
        shown = ", ".join(f"{pid} ({name}, {memory} MiB)" for pid, name, memory in rows[:8])
        return fail(
            "other jobs on the GPUs",
            f"{len(rows)} processes: {shown}",
            "what is measured beside another job is not the machine: wait, or take the node alone "
            "(--exclusive)",
        )
    return ok("other jobs on the GPUs", "none")
