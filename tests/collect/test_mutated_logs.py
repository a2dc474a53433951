"""Logs of several runs, put together at random: the import says what each run was, or not known."""

import random
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from dynamiccl.errors import OutputError
from dynamiccl.nccl import Collective
from tests.collect.parsed import imported

PROGRAMS = {"all_reduce": "AllReduce", "reduce_scatter": "ReduceScatter", "all_gather": "AllGather"}
DEATHS = ("n1: Test NCCL failure common.cu:401 'invalid usage'", "Killed", "Segmentation fault")
ENDS = ("whole", "whole", "no tail", "no header", "dies", "dies", "cut", "twice")


class Truth(NamedTuple):
    """What a run was; `algorithm` None is NCCL's own choice."""

    program: str
    algorithm: str | None
    registered: bool
    num_ranks: int


def shell(draw: random.Random, run: str, algo: str, env: dict[str, str]) -> tuple[list[str], bool]:
    """Lines up to a command, and whether they force `algo` for it alone; `env`: exported."""
    kinds = {
        "plain": [run],
        "export": [f"export NCCL_ALGO={algo}", run],
        "late": [f"NCCL_ALGO={algo}", "export NCCL_ALGO", run],
        "unset": [f"export NCCL_ALGO={algo}", "unset NCCL_ALGO", run],
        "without": [f"env -u NCCL_ALGO {run}"],
        "comment": [f"# export NCCL_ALGO={algo}", f"#NCCL_ALGO={algo}", run],
        "never": ['if [ "$1" = x ]; then', f"  export NCCL_ALGO={algo}", "fi", run],
        "subshell": [f"(export NCCL_ALGO={algo}; make)", run],
        "inline": [f"NCCL_ALGO={algo} {run}"],
        "mpirun": ["mpirun -np 4 \\", f"  -x NCCL_ALGO={algo} \\", f"  {run}"],
        "loop": [f'for a in "{algo}"; do NCCL_ALGO=$a {run}; done'],
        "banner": [f"=== NCCL_ALGO={algo} ===", f"NCCL_ALGO=$X {run}"],
    }
    kind = draw.choice([*kinds])
    if kind in {"export", "late"}:
        env["NCCL_ALGO"] = algo
    elif kind == "unset":
        env.clear()
    lines = [draw.choice(["", "$ ", "me@n1:~$ "]) + line for line in kinds[kind]]
    is_hidden = kind in {"export", "late", "unset"} and "-R" not in run and draw.random() < 0.3
    is_own = {*kinds} - {"inline", "mpirun", "loop", "banner"}
    return lines[:-1] if is_hidden else lines, kind not in is_own


def output(draw: random.Random, truth: Truth, time_us: float) -> list[str]:
    """What a run prints: whole, without its beginning or its tail, or until it dies."""
    algbw, op = (1 << 20) / time_us / 1e3, "none" if truth.program == "all_gather" else "sum"
    factor = Collective.parse(PROGRAMS[truth.program]).bus_factor(truth.num_ranks)
    info = [f"n1:7:7 [0] NCCL INFO NCCL_ALGO set by environment to {truth.algorithm}"]
    header = [
        f"# Collective test starting: {truth.program}_perf",
        "# nThread 1 nGpus 1 minBytes 1048576 maxBytes 1048576 step: 2(factor) iters: 20",
        "# Using devices",
        *(f"# Rank {r} Pid 7 on n1 device {r} [0000:0{r}:00] H" for r in range(truth.num_ranks)),
        *(info if truth.algorithm and draw.random() < 0.2 else []),
    ]
    half = f" {time_us:.2f} {algbw:.2f} {algbw * factor:.2f} 0"
    names = "# size count type redop root" + 2 * " time algbw busbw #wrong"
    table = [names, f"1048576 262144 float {op} -1{half}{half}"]
    tail = ["# Out of bounds values : 0 OK", "# Avg bus bandwidth : 9.9"]
    tail += [f"n1:7:7 [0] NCCL INFO comm 0x1 rank 0 nranks {truth.num_ranks} - Destroy COMPLETE"]
    whole, cut = [*header, *table, *tail], draw.randrange(1, len(header) + 3)
    return {
        "no tail": [*header, *table],
        "no header": [*header[draw.randrange(1, len(header)) :], *table, *tail],
        "dies": [*whole[:cut], draw.choice(DEATHS)],
        "cut": whole[:cut],
        "twice": [*header, *whole],
    }.get(draw.choice(ENDS), whole)


def wrong(row: dict[str, Any], truth: Truth) -> list[str]:
    """What of a row is neither true nor said to be unknown."""
    known = row["is_default"] or row["requested_algorithm"] is not None
    registered = "local_register=2" in row["launch_profile"]
    said = {
        "collective": row["collective"] == PROGRAMS[truth.program],
        "config": not known or row["requested_algorithm"] == truth.algorithm,
        "option": not known or registered == truth.registered,
        "ranks": row["num_ranks"] in {None, truth.num_ranks},
        "repeat": row["repeat"] == 0,
    }
    return [name for name, is_right in said.items() if not is_right]


@pytest.mark.parametrize("seed", range(40))
def test_nothing_wrong_is_said_of_a_run(seed: int, tmp_path: Path) -> None:
    draw, env, truths = random.Random(seed), dict[str, str](), list[Truth]()
    lines, printed = list[str](), list[str]()
    for number in range(5):
        program, algo = draw.choice([*PROGRAMS]), draw.choice(["Ring", "Tree"])
        registered = draw.random() < 0.2
        run = f"./{program}_perf -b 1M -g 1{' -R 2' if registered else ''}"
        shown, is_forced = shell(draw, run, algo, env)
        asked = None if "env -u" in shown[-1] else env.get("NCCL_ALGO")
        truths.append(Truth(program, algo if is_forced else asked, registered, draw.choice([2, 4])))
        if lines and "export" in shown[0] and draw.random() < 0.3:
            # Printed too early, among the last lines of the run before.
            lines.insert(len(lines) - draw.randrange(min(4, len(printed))), shown.pop(0))
        printed = output(draw, truths[-1], 50.0 + number)
        lines += [*shown, *printed]
    try:
        summary, rows = imported(tmp_path / "runs.log", "\n".join([*lines, ""]))
    except OutputError:
        return  # nothing of it is taken, which is said
    rows = [row for row in rows if row["status"] == "ok"]
    found = [(row["time_us"], wrong(row, truths[int(row["time_us"]) - 50])) for row in rows]
    assert not [each for each in found if each[1]], "\n".join(lines)
    num_rows = sum("262144 float" in line for line in lines)
    assert len(rows) // 2 + summary.dropped + summary.num_rejected >= num_rows
