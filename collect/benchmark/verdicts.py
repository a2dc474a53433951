"""Verdicts on the blocks of a launch, by the plugin's report and the communicators of the run."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from dynamiccl.collect.benchmark.blocks import REPORT_S, Verdict, await_report, judge_blocks
from dynamiccl.collect.benchmark.file_system import is_local
from dynamiccl.collect.benchmark.output import Block, Output
from dynamiccl.collect.grid import Comms, Setting
from dynamiccl.collect.nccl_tests.facts import RankLine, listed_ranks
from dynamiccl.collect.runner import Launch
from dynamiccl.datasets.schema import Status

_NO_TIMES = (
    "processes are left over, whose times are in the mean, and nccl-tests prints no per-process "
    "times: that needs 2.19.2 or later (-I -J)"
)


def verdicts_of(
    launch: Launch, folder: Path, output: Output, lines: Sequence[str]
) -> list[Verdict]:
    """A verdict for each block that has a row; waits until the plugin's report covers them all."""
    num_rows = len(output.blocks)
    wrong = wrong_comms(launch.setting, lines)
    if wrong is not None:
        return [Verdict(Status.FAILED, wrong)] * num_rows
    await_report(launch, folder, num_rows, 0.0 if is_local(folder) else REPORT_S)
    return judge_blocks(launch, folder, num_rows)


def wrong_comms(setting: Setting, lines: Sequence[str]) -> str | None:
    """Why the communicators differ from the setting's, or None when they agree or are unknown.

    nccl-tests prints the colour of each rank as its group (`src/util.cu`, writeDeviceReport).
    """
    groups: dict[int, list[RankLine]] = defaultdict(list)
    for line in listed_ranks(lines):
        groups[line.group].append(line)
    comms = setting.comms
    if comms is None:
        if len(groups) < 2:
            return None
        return (
            f"nccl-tests made {len(groups)} communicators of the ranks in place of one; remove "
            "NCCL_TESTS_SPLIT from the environment, and use split in the sweep file"
        )
    found = {tuple(sorted(line.rank for line in group)) for group in groups.values()}
    if not groups or not set(comms.members) <= found:
        return (
            f"nccl-tests made other communicators than split '{setting.split}' asks for (groups "
            f"of {', '.join(map(str, sorted({len(each) for each in found}))) or 'no'} ranks); it "
            "needs nccl-tests 2.14 or later, built with MPI"
        )
    return _scattered(setting, comms, [line for group in groups.values() for line in group])


def _scattered(setting: Setting, comms: Comms, ranks: Sequence[RankLine]) -> str | None:
    """Why ranks do not lie node by node, which would change the communicators' shape; or None."""
    hosts = {line.rank: line.host for line in ranks}
    for members in comms.members:
        if len({hosts[process] for process in members}) != comms.num_nodes:
            return (
                f"ranks {', '.join(map(str, members[:4]))} of one communicator are not on "
                f"{comms.num_nodes} of {setting.hosts} hosts: ranks must be started node by node "
                "(srun --distribution=block, mpirun --map-by ppr)"
            )
    return None


def of_members(blocks: Sequence[Block], setting: Setting, verdicts: list[Verdict]) -> list[Verdict]:
    """Replace times by those of whole communicators, leaving out ranks that belong to none.

    nccl-tests prints the mean over all ranks, these included; `blocks` are corrected in place.
    Verdicts of blocks that have no times of single processes become failed ones.
    """
    comms = setting.comms
    if comms is None or not setting.spare:
        return verdicts
    processes = [process for members in comms.members for process in members]
    judged = []
    for block, verdict in zip(blocks, verdicts, strict=True):
        has_times = all(half.get("process_times_us") for half in block)
        for half in block if has_times else ():
            times_us = half["process_times_us"]
            _set_time(half, sum(times_us[process] for process in processes) / len(processes))
        known = verdict if has_times else replace(verdict, status=Status.FAILED, reason=_NO_TIMES)
        judged.append(known)
    return judged


def _set_time(half: dict[str, object], time_us: float) -> None:
    factor = float(str(half["time_us"])) / time_us
    half["time_us"] = time_us
    for name in ("algbw_gbytes_per_s", "busbw_gbytes_per_s"):
        half[name] = float(str(half[name])) * factor
