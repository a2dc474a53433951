"""`dynamiccl-deploy ab`, the proof in the job: its step time with DynamICCL and without, in turns.

A launch is worth the median of the step times in its output, or its whole time where it tells none.
In how many communicators a table acted is in NCCL's log, which launches of both arms print.
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
from dynamiccl.serve.install import RUN_NAME
from dynamiccl.train.commands.options import Json

#: The mode of a job that says none.
DEFAULT_MODE: Final = "table"
#: Verdict -> exit code. The others, with 0: faster, not worse, not told apart, unknown.
EXIT_CODES: Final = {"worse": 1, "fails": 1, "not tested": 3, "fails without us": 4}
#: By how much a job may be slower unless somebody says otherwise, and for doctor.
WORSE: Final = 0.02
#: What proves that a step is no longer.
PROVEN: Final = frozenset({"faster", "not worse"})
#: Each finds a step's time in a line of output; in ms where what it matches says so.
STEP_TIMES: Final = (
    r"elapsed time per iteration \(ms\):\s*([\d.]+)",  # Megatron-LM
    r"\bstep[ _-]?time[\"']?\s*[:=]?\s*([\d.]+)(?:\s*m?s\b)?",
    r"\b([\d.]+)\s*m?s/(?:it|step|iter)\b",  # tqdm
)
#: Steps that are left out of each launch, those that are needed then, and the pairs before a stop.
_WARM_UP, _LEAST_STEPS, _LEAST_PAIRS = 5, 3, 3
#: Student's t by degrees of freedom from 1 on, the last for more: two-sided 95 %, and one-sided
#: 99.5 % for what is asked after each pair.
_T_975: Final = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201)
_T_995: Final = (63.657, 9.925, 5.841, 4.604, 4.032, 3.707, 3.499, 3.355, 3.250, 3.169, 3.106)
#: What the plugin says of a communicator, once a rank (plugin/tuner/init.cpp).
_TOLD: Final = re.compile(
    r"DYNAMICCL: (\d+) ranks on (\d+) nodes: "
    r"(?:the artifact's table, from call 0: it acts in (\d+) |NCCL's own choice stands: (.*))"
)
#: What dynamiccl-run and dynamiccl-prepare say where no table can act.
_PREPARED: Final = re.compile(r"dynamiccl-run: ((?:loads no|NCCL's own choice stands).*)")
#: How long a job that is told to end may take until it is killed.
_GRACE_S: Final = 10.0
#: A launch without a limit may take so many times as long as the other kind's, and that at least.
_MUCH_LONGER, _LEAST_LIMIT_S = 3.0, 1800.0
#: A job that says nothing for so many of its steps, and seconds, hangs.
_SILENT_STEPS, _SILENT_S = 20.0, 60.0
#: And for so many times what lies between two lines with steps.
_SILENT_LINES: Final = 5.0


@dataclass(frozen=True, slots=True)
class Launch:
    """The job, run once."""

    arm: str
    output: str
    #: Why it counts as failed; None: it ran well.
    problem: str | None
    wall_s: float
    #: Whether it was ended when its time was up.
    was_cut: bool
    #: For how long it had said nothing when it ended, or was.
    silent_s: float
    #: None: too few steps were found.
    step_s: float | None
    #: Communicators in which a table acted, all of them, and why none did, as most ranks have it.
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


def limit_s(seconds: float | None, without: Iterable[Launch]) -> float:
    """How long a launch may take: what was asked for, else by those that ran `without` us.

    A job that hangs with us is to be found though nobody watches.
    """
    longest_s = max((each.wall_s for each in without), default=math.inf)
    return seconds or max(_LEAST_LIMIT_S, _MUCH_LONGER * longest_s)


def launch(
    arm: str,
    artifact: Path,
    command: Sequence[str],
    output: Path,
    limit: float,
    step_time: str | None,
) -> Launch:
    """Run a job once, for `limit` s at most; nothing of it is left when this ends.

    `step_time` is in place of STEP_TIMES.
    """
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
            # Polars takes SIGINT with SA_RESTART: a wait without a limit would not hear Ctrl-C.
            code = job.wait(limit)
    finally:
        # Before it is ended: launchers speak when they are.
        silent_s = time.time() - output.stat().st_mtime
        _end(job)
    wall_s = time.monotonic() - began
    # A carriage return ends a line, too, as progress bars have it.
    with output.open(encoding="utf-8", errors="replace") as lines:
        steps = [step for line in lines if (step := step_of(line, step_time))][_WARM_UP:]
        lines.seek(0)
        tables = tables_in(lines)
    step_s = median(steps) if len(steps) >= _LEAST_STEPS else None
    problem = f"exit code {code}" if code else None
    if code is None and step_s is None:  # its whole time is what it was given
        least = _WARM_UP + _LEAST_STEPS
        problem = f"fewer than {least} step times were found in its {limit:g} s"
    # As often as it spoke before, whatever its log's interval is.
    rhythm_s = (wall_s - silent_s) / max(len(steps), 1)
    usual_s = max(_SILENT_S, _SILENT_STEPS * (step_s or 0.0), _SILENT_LINES * rhythm_s)
    if code is None and not problem and silent_s > usual_s:
        problem = f"it said nothing in the last {silent_s:.0f} of its {limit:g} s"
    return Launch(arm, str(output), problem, wall_s, code is None, silent_s, step_s, *tables)


def environment_of(arm: str, artifact: Path) -> dict[str, str]:
    """This environment, with NCCL's log in the job's output; `without` us without what is ours.

    With us it names the artifact that is judged, whatever is installed meanwhile.
    """
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
    """End what is left of a launch's process group; a second Ctrl-C kills it at once."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(job.pid, number)
        with suppress(subprocess.TimeoutExpired, KeyboardInterrupt):
            job.wait(_GRACE_S)


def step_of(line: str, step_time: str | None = None) -> float | None:
    """Seconds of the step that a line of output tells; None where it tells none."""
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
    # There is a line of each rank.
    counts = [(acted, -(-number // ranks)) for (ranks, _, acted), number in said.items()]
    acted_in = sum(count for acted, count in counts if acted)
    reason = reasons.most_common(1)[0][0] if reasons else None
    return acted_in, sum(count for _, count in counts), reason


def interval(ratios: Sequence[float], t: Sequence[float] = _T_975) -> tuple[float, float]:
    """Of the mean of log ratios, by quantiles of Student's t; infinite with fewer than two."""
    if len(ratios) < 2:
        return -math.inf, math.inf
    half = t[min(len(ratios) - 1, len(t)) - 1] * stdev(ratios) / math.sqrt(len(ratios))
    return fmean(ratios) - half, fmean(ratios) + half


def is_worse(ratios: Sequence[float], worse: float) -> bool:
    """Whether the job is slower beyond the share `worse`, though that is asked after each pair."""
    return len(ratios) >= _LEAST_PAIRS and interval(ratios, _T_995)[0] > math.log1p(worse)


def conclude(pairs: Sequence[tuple[Launch, Launch]], worse: float) -> tuple[str, list[str]]:
    """A verdict on pairs of launches with us and without, and what it stands on."""
    ours, theirs = pairs[-1]
    if theirs.problem:
        return "fails without us", [f"not our doing, {theirs.in_short}"]
    hangs = ours.was_cut and not theirs.was_cut and ours.silent_s > theirs.wall_s
    if ours.problem or hangs:
        ended = f"it did not end in {ours.wall_s:.4g} s, and did in {theirs.wall_s:.4g} s without"
        why = ours.in_short if ours.problem else f"{ended}; see {ours.output}"
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
    if is_worse(ratios, worse):
        return "worse", [said, tables]
    if not acted:
        return "not tested", [tables, said]
    if len(ratios) < 2:
        return "unknown", [said, tables]
    verdict = "not worse" if high < math.log1p(worse) else "not told apart"
    return "faster" if high < 0 else verdict, [said, tables]


def tables_acted(pairs: Sequence[tuple[Launch, Launch]]) -> tuple[bool, str]:
    """Whether tables acted with us alone, and in how many communicators.

    In modes observe and adaptive none need act from call 0 on.
    """
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


# --- The command ---


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
    worse: Annotated[float, typer.Option(help="Share slower that is borne.", min=0)] = WORSE,
    keep: Annotated[bool, typer.Option("--keep", help="Never switch the artifact off.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for outputs; default ab-TIME.")] = None,
    as_json: Json = False,
) -> None:
    """Launch a job in turns with DynamICCL and without, and compare its step times.

    Where it is slower or fails with us it stops and switches the artifact off (kill file); it stops
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
        "worse": worse,
        "mode": os.environ.get("DYNAMICCL_MODE") or DEFAULT_MODE,
        "artifact": str(artifact),
        "switched_off": None,
        "launches": [],
    }
    _write(out, record)
    done: list[tuple[Launch, Launch]] = []
    with cli.interruptible(lambda: f"{record['said'][0]}; {out / AB_NAME} keeps it"):
        while len(done) < pairs and record["verdict"] not in EXIT_CODES:
            pair: dict[str, Launch] = {}
            # The first is without us: by its time a hang with us is told.
            arms = random.sample(("with", "without"), 2) if done else ["without", "with"]
            for arm in arms:
                number = 2 * len(done) + len(pair) + 1
                told = f"launch {number} of {2 * pairs}, {arm} DynamICCL"
                started = [str(wrapper), "--", *command] if arm == "with" else command
                with cli.working(told):
                    log = out / f"{number:02d}-{arm}.log"
                    known = [theirs for _, theirs in done] or list(pair.values())
                    limit = limit_s(seconds, known)
                    pair[arm] = launch(arm, artifact, started, log, limit, step_time)
                print(f"{told}: {pair[arm].in_short}", file=sys.stderr, flush=True)
            done.append((pair["with"], pair["without"]))
            record["verdict"], record["said"] = conclude(done, worse)
            record["launches"] += [asdict(each) for each in pair.values()]
            # Now, so that nothing is lost however often somebody presses Ctrl-C.
            _write(out, record)
    code = EXIT_CODES.get(record["verdict"], 0)
    try:
        if code == 1 and not keep:
            kill.touch()
            record["switched_off"] = str(kill)
            off = "switched off: new jobs make NCCL's own choice; on again: rm"
            record["said"].append(f"{off} {kill}")
        elif code == 1:
            record["said"].append(f"NOT switched off (--keep); to do so: touch {kill}")
        # What another mode shows says nothing of the tables, and what shows nothing hides nothing.
        is_proof = record["mode"] == DEFAULT_MODE and (code == 1 or record["verdict"] in PROVEN)
        if is_proof or record["switched_off"]:
            _write(artifact, record)
    except OSError as error:  # another user's installation
        record["said"].append(f"NOT WRITTEN: {error}")
    _write(out, record)
    if as_json:
        cli.print_json(record)
    else:
        print("\n".join([f"{record['verdict']}: {record['said'][0]}", *record["said"][1:]]))
        print(f"all of it: {out / AB_NAME}")
    raise typer.Exit(code)


def _wrapper(home: Path | None) -> Path:
    """dynamiccl-run of the installation that is named, else of the environment's."""
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
    """Raise UserError for what would not run, and for what an earlier outcome forbids."""
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


def _write(folder: Path, record: dict[str, Any]) -> None:
    hidden = folder / f".{AB_NAME}"
    hidden.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    hidden.replace(folder / AB_NAME)
