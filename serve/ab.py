"""`dynamiccl-deploy ab`, the proof in the job: its step time with DynamICCL and without, in turns.

A launch is worth its median step time, or its whole time where its output tells none. NCCL's log
tells where tables acted. The first order is drawn, then reversed pair by pair, so that neither arm
gains from what warms up, fills up or slows down.
"""

import json
import math
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Annotated, Any, Final

import typer

from dynamiccl import cli
from dynamiccl.datasets.manifest import AB_NAME, KILL_NAME
from dynamiccl.errors import UserError
from dynamiccl.files import replacing
from dynamiccl.serve.install import RUN_NAME
from dynamiccl.train.options import Json

DEFAULT_MODE: Final = "table"
#: The other verdicts have 0: faster, not worse, not told apart, unknown.
EXIT_CODES: Final = {"worse": 1, "fails": 1, "not tested": 3, "fails without us": 4}
#: A job may be so much slower: less is noise.
WORSE: Final = 0.02
PROVEN: Final = frozenset({"faster", "not worse"})
#: Each finds a step's time in a line; in ms where its match says so.
STEP_TIMES: Final = (
    r"elapsed time per iteration \(ms\):\s*([\d.]+)",  # Megatron-LM
    r"\bstep[ _-]?time[\"']?\s*[:=]?\s*([\d.]+)(?:\s*m?s\b)?",
    r"\b([\d.]+)\s*m?s/(?:it|step|iter)\b",  # tqdm
)
#: Steps left out of a launch, steps needed then, and pairs before a stop.
_WARM_UP, _LEAST_STEPS, _LEAST_PAIRS = 5, 3, 3
#: Student's t by degrees of freedom from 1, the last for more: two-sided 95 %, and one-sided
#: 99.5 % for what is asked after each pair.
_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
_T_995: Final = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106)
#: What the plugin says of a communicator, once a rank (plugin/tuner/init.h).
_TOLD: Final = re.compile(
    r"DYNAMICCL: (\d+) ranks on (\d+) nodes: "
    r"(?:the artifact's table, from call 0: it acts in (\d+) |NCCL's own choice stands: (.*))"
)
_PREPARED: Final = re.compile(r"dynamiccl-run: ((?:loads no|NCCL's own choice stands).*)")
#: Between the request to end and the kill.
_GRACE_S: Final = 10.0
#: Limit of a launch without --seconds: times the other kind's, and at least.
_MUCH_LONGER, _LEAST_LIMIT_S = 3.0, 1800.0
#: An endless job hangs that is silent for so many of the other kind's steps and lines, and seconds;
#: any job that was ended, for such a share of its time where the other kind was not.
_SILENT_STEPS, _SILENT_LINES, _SILENT_S, _SILENT_SHARE = 20.0, 5.0, 60.0, 1 / 3


@dataclass(frozen=True, slots=True)
class Launch:
    """The job, run once."""

    arm: str
    output: str
    problem: str | None
    wall_s: float
    was_cut: bool
    silent_s: float
    #: Steps found without the first ones, and their median; None: too few.
    num_steps: int
    step_s: float | None
    #: Communicators in which a table acted, all of them, and most ranks' reason for none.
    acted_in: int
    communicators: int
    reason: str | None

    @property
    def in_short(self) -> str:
        """How it went."""
        if self.problem:
            return f"{self.problem}; see {self.output}"
        if self.step_s is None:
            return f"{self.wall_s:.4g} s in all; no step time was found, see --step-time"
        return f"{self.step_s:.4g} s a step"


def launch(
    arm: str,
    artifact: Path,
    command: Sequence[str],
    output: Path,
    limit: float,
    step_time: str | None,
) -> Launch:
    """Run a job for `limit` s at most, and leave nothing of it; `step_time` replaces STEP_TIMES."""
    began, code = time.monotonic(), None
    with output.open("wb") as log:
        job = subprocess.Popen(
            command,
            env=environment_of(arm, artifact),
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        with suppress(subprocess.TimeoutExpired):
            # Without a limit it hears no Ctrl-C: Polars takes SIGINT with SA_RESTART.
            code = job.wait(limit)
    finally:
        # Before it is ended, which makes launchers speak.
        silent_s = time.time() - output.stat().st_mtime
        _end(job)
    wall_s = time.monotonic() - began
    # Progress bars end lines with a carriage return.
    with output.open(encoding="utf-8", errors="replace") as lines:
        steps = [step for line in lines if (step := step_of(line, step_time))][_WARM_UP:]
        lines.seek(0)
        tables = tables_in(lines)
    step_s = median(steps) if len(steps) >= _LEAST_STEPS else None
    problem = f"exit code {code}" if code else None
    if code is None and step_s is None:  # its whole time is what it was given
        least = _WARM_UP + _LEAST_STEPS
        problem = f"fewer than {least} step times were found in its {limit:g} s"
    ended = problem, wall_s, code is None, silent_s
    return Launch(arm, str(output), *ended, len(steps), step_s, *tables)


def environment_of(arm: str, artifact: Path) -> dict[str, str]:
    """The arm's environment, with NCCL's log on; an install meanwhile changes no arm."""
    found = dict(os.environ)
    found.pop("NCCL_DEBUG_FILE", None)
    found["PYTHONUNBUFFERED"] = "1"  # else a file gets lines by the hundred
    subsystems = found.get("NCCL_DEBUG_SUBSYS", "")
    if found.get("NCCL_DEBUG", "").upper() not in {"INFO", "TRACE"}:
        found |= {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT"}
    elif subsystems and not subsystems.startswith("^"):
        found["NCCL_DEBUG_SUBSYS"] = f"{subsystems},INIT"
    if arm == "without":
        plugins = {"NCCL_TUNER_PLUGIN", "NCCL_PROFILER_PLUGIN"}
        for name, value in list(found.items()):
            if name.startswith("DYNAMICCL_") or (name in plugins and "dynamiccl" in value):
                del found[name]
        found["DYNAMICCL_DISABLE"] = "1"  # a dynamiccl-run within the command does nothing, too
    else:
        found["DYNAMICCL_ARTIFACT"] = str(artifact)
    return found


def _end(job: "subprocess.Popen[bytes]") -> None:
    """End what is left of a process group; a second Ctrl-C kills it at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(job.pid, number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            job.wait(_GRACE_S)


def step_of(line: str, step_time: str | None = None) -> float | None:
    """Seconds of the step that a line of output tells; None: it tells none."""
    for pattern in [step_time] if step_time else STEP_TIMES:
        if found := re.search(pattern, line, re.IGNORECASE):
            in_ms = re.search(r"(?<![a-z])ms\b", found[0], re.IGNORECASE)
            with suppress(TypeError, ValueError):
                step = float(found[1]) * (1e-3 if in_ms else 1.0)
                return step if 0 < step < math.inf else None
    return None


def tables_in(lines: Iterable[str]) -> tuple[int, int, str | None]:
    """Communicators in which a table acted, all of them, and why none did."""
    said: Counter[tuple[int, int, bool]] = Counter()
    reasons: Counter[str] = Counter()
    for line in lines:
        reason = None
        if found := _TOLD.search(line):
            ranks, nodes, bins, reason = found.groups()
            if bins == "0":
                reason = f"the table for {ranks} ranks on {nodes} nodes acts at no size"
            said[int(ranks), int(nodes), reason is None] += 1
        elif found := _PREPARED.search(line):
            reason = found[1]
        if reason:
            reasons[reason.strip()] += 1
    # Each rank prints a line.
    counts = [(acted, -(-number // ranks)) for (ranks, _, acted), number in said.items()]
    acted_in = sum(count for acted, count in counts if acted)
    reason = reasons.most_common(1)[0][0] if reasons else None
    return acted_in, sum(count for _, count in counts), reason


def interval(ratios: Sequence[float], t: Sequence[float] = _T_975) -> tuple[float, float]:
    """Interval of the mean of log ratios, by Student's t; infinite with fewer than two."""
    if len(ratios) < 2:
        return -math.inf, math.inf
    half = t[min(len(ratios) - 1, len(t)) - 1] * stdev(ratios) / math.sqrt(len(ratios))
    return fmean(ratios) - half, fmean(ratios) + half


def is_worse(ratios: Sequence[float]) -> bool:
    """Whether the job is slower beyond noise, though asked after each pair."""
    return len(ratios) >= _LEAST_PAIRS and interval(ratios, _T_995)[0] > math.log1p(WORSE)


def usual_silence_s(ours: Launch, theirs: Launch) -> float:
    """How long a job may say nothing at its end; one that is silent for longer hangs."""
    usual_s, least_s = theirs.wall_s, _SILENT_S
    if theirs.was_cut:
        line_s = (theirs.wall_s - theirs.silent_s) / (theirs.num_steps + _WARM_UP)
        least_s = max(least_s, _SILENT_LINES * line_s)
        usual_s = max(least_s, _SILENT_STEPS * (theirs.step_s or 0.0))
    if theirs.silent_s <= _SILENT_SHARE * theirs.wall_s:
        usual_s = min(usual_s, max(least_s, _SILENT_SHARE * ours.wall_s))
    return usual_s


def conclude(pairs: Sequence[tuple[Launch, Launch]]) -> tuple[str, list[str]]:
    """A verdict on pairs (with us, without), and what it stands on."""
    ours, theirs = pairs[-1]
    if theirs.problem:
        return "fails without us", [f"not our doing, {theirs.in_short}"]
    if ours.problem or (ours.was_cut and ours.silent_s > usual_silence_s(ours, theirs)):
        silent = f"it said nothing in the last {ours.silent_s:.0f} of its {ours.wall_s:.0f} s"
        why = ours.in_short if ours.problem else f"{silent}; see {ours.output}"
        return "fails", [f"with DynamICCL and not without, {why}"]
    what, times = "step time", [(a.step_s, b.step_s) for a, b in pairs if a.step_s and b.step_s]
    if len(times) < len(pairs):
        what, times = "time of whole launches", [(a.wall_s, b.wall_s) for a, b in pairs]
    ratios = [math.log(with_us / without) for with_us, without in times]
    low, high = interval(ratios)
    said = f"{what} {math.expm1(fmean(ratios)):+.1%} with DynamICCL"
    ends = f"95% interval: {math.expm1(low):+.1%} to {math.expm1(high):+.1%}, {len(ratios)} pairs"
    said += f" ({ends})" if len(ratios) > 1 else " (one pair; an interval needs two)"
    acted, tables = tables_acted(pairs)
    if is_worse(ratios):
        return "worse", [said, tables]
    if not acted:
        return "not tested", [tables, said]
    if len(ratios) < 2:
        return "unknown", [said, tables]
    verdict = "not worse" if high < math.log1p(WORSE) else "not told apart"
    return "faster" if high < 0 else verdict, [said, tables]


def tables_acted(pairs: Sequence[tuple[Launch, Launch]]) -> tuple[bool, str]:
    """Whether tables acted with us alone, or the mode needs none, and in how many communicators."""
    if any(theirs.acted_in for _, theirs in pairs):
        return False, "tables acted without DynamICCL, too: the command loads it by itself"
    acted = sum(ours.acted_in for ours, _ in pairs)
    count = sum(ours.communicators for ours, _ in pairs)
    reason = next((ours.reason for ours, _ in pairs if ours.reason), None)
    said = f"tables acted in {acted} of {count} communicators ({len(pairs)} launches)"
    if reason:
        said += f"{', not in others' if acted else ''}: {reason}"
    elif not count:
        said = (
            "whether a table acted is not known: NCCL's log in the output says nothing of it; is "
            "it NCCL 2.24 or later, and does the job leave NCCL_DEBUG=INFO as it is?"
        )
    return acted > 0 or os.environ.get("DYNAMICCL_MODE") in {"observe", "adaptive"}, said


def ab_command(
    command: Annotated[list[str], typer.Argument(metavar="-- COMMAND", help="The job.")],
    home: Annotated[
        Path | None, typer.Option(help="Where 'install' put it; default DYNAMICCL_HOME or by PATH.")
    ] = None,
    pairs: Annotated[int, typer.Option(help="Launches of each kind.", min=1)] = 5,
    seconds: Annotated[float | None, typer.Option(help="End each launch then.", min=1)] = None,
    step_time: Annotated[
        str | None,
        typer.Option(metavar="REGEX", help="One group: a step's s, or ms where 'ms' is matched."),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for outputs; default ab-TIME.")] = None,
    as_json: Json = False,
) -> None:
    """Launch a job in turns with DynamICCL and without, and compare its step times.

    Without --seconds a first launch, which no pair counts, tells how long one may take. Where the
    job is slower or fails with us it stops and switches the artifact off (kill file); it stops
    where no table acts, too. The verdict is kept beside the artifact for 'doctor' (ab.json).
    Exit code 1: slower, or fails; 3: no table acted; 4: the job fails without us.

    Example: dynamiccl-deploy ab --home /shared/dynamiccl -- python train.py
    """
    wrapper = _wrapper(home)
    artifact = Path(os.environ.get("DYNAMICCL_ARTIFACT") or wrapper.parents[1] / "artifact")
    artifact = artifact.resolve()  # what is installed meanwhile is another one
    kill = Path(os.environ.get("DYNAMICCL_KILL_FILE") or artifact / KILL_NAME)
    out = out or Path(time.strftime("ab-%Y%m%d-%H%M%S"))
    _check(command, kill, step_time, out)
    out.mkdir(parents=True, exist_ok=True)
    record: dict[str, Any] = {
        "verdict": "unknown",
        "said": ["no pair was finished"],
        "command": command,
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "out": str(out.absolute()),
        "mode": os.environ.get("DYNAMICCL_MODE") or DEFAULT_MODE,
        "artifact": str(artifact),
        "switched_off": None,
        "launches": [],
    }
    _write(out, record)
    done: list[tuple[Launch, Launch]] = []
    limit = seconds or math.inf

    def launched(number: int, arm: str) -> Launch:
        told = f"launch {number} of {2 * pairs}, {arm} DynamICCL"
        words = [str(wrapper), "--", *command] if arm == "with" else command
        with cli.working(told):
            log = out / f"{number:02d}-{arm}.log"
            ended = launch(arm, artifact, words, log, limit, step_time)
        print(f"{told}: {ended.in_short}", file=sys.stderr, flush=True)
        return ended

    with cli.interruptible(lambda: f"{record['said'][0]}; {out / AB_NAME} keeps it"):
        if seconds is None:
            first = launched(0, "without")
            # A job that hangs with us is found though nobody watches.
            limit = max(_LEAST_LIMIT_S, _MUCH_LONGER * first.wall_s)
            if first.problem:
                record["verdict"], record["said"] = conclude([(first, first)])
        arms = random.sample(("with", "without"), 2)
        while len(done) < pairs and record["verdict"] not in EXIT_CODES:
            pair = {arm: launched(2 * len(done) + at, arm) for at, arm in enumerate(arms, 1)}
            arms.reverse()
            done.append((pair["with"], pair["without"]))
            record["verdict"], record["said"] = conclude(done)
            record["launches"] += [asdict(each) for each in pair.values()]
            # Here, so that a second Ctrl-C loses nothing.
            _write(out, record)
    code = EXIT_CODES.get(record["verdict"], 0)
    try:
        _tell_installation(record, artifact, kill, off=code == 1)
    except OSError as error:  # another user's
        record["said"].append(f"NOT WRITTEN: {error}")
    _write(out, record)
    if as_json:
        cli.print_json(record)
    else:
        print("\n".join([f"{record['verdict']}: {record['said'][0]}", *record["said"][1:]]))
        print(f"all of it: {out / AB_NAME}")
    raise typer.Exit(code)


def _wrapper(home: Path | None) -> Path:
    named = home or os.environ.get("DYNAMICCL_HOME")
    folder = str(Path(named).absolute() / "bin") if named else None
    found = shutil.which(RUN_NAME, path=folder)
    if found is None:
        raise UserError(
            f"no {RUN_NAME} {f'in {folder}' if folder else 'on PATH'}; give --home DIR, where "
            "'dynamiccl-deploy install ARTIFACT --to DIR' put it"
        )
    return Path(found).resolve()


def _check(command: list[str], kill: Path, step_time: str | None, out: Path) -> None:
    if kill.exists():
        raise UserError(f"the artifact is switched off; on again: rm {kill}")
    if (out / AB_NAME).exists():
        raise UserError(f"--out {out} holds the outcome of another run; name another folder")
    if shutil.which(command[0]) is None:
        raise UserError(f"no program '{command[0]}'; give the job's command after --")
    try:
        groups = 1 if step_time is None else re.compile(step_time).groups
    except re.error as error:
        raise UserError(f"--step-time '{step_time}' is no regular expression: {error}") from error
    if groups < 1:
        raise UserError(f"--step-time '{step_time}' has no group; write one around the number")


def _tell_installation(record: dict[str, Any], artifact: Path, kill: Path, *, off: bool) -> None:
    if off:
        kill.touch()
        record["switched_off"] = str(kill)
        said = f"switched off: new jobs make NCCL's own choice; on again: rm {kill}"
        record["said"].append(said)
    # Other modes say nothing of tables; an unproven verdict hides no earlier one.
    if off or (record["mode"] == DEFAULT_MODE and record["verdict"] in PROVEN):
        _write(artifact, record)


def _write(folder: Path, record: dict[str, Any]) -> None:
    with replacing(folder / AB_NAME) as hidden:
        hidden.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
