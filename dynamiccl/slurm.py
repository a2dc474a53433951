"""Slurm by its commands sbatch, squeue and scontrol; needs no accounting database.

Also a lock that a job which Slurm starts anew gets back where the file system has none (`hold`),
and lists of hosts as Slurm writes them.
"""

import errno
import fcntl
import json
import logging
import os
import re
import subprocess
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Final

from dynamiccl.errors import MachineError, UserError
from dynamiccl.files import replacing

_log = logging.getLogger(__name__)

#: Errors by which a file system says that it has no locks: Lustre without `-o flock` ENOSYS, NFS
#: without a lock manager ENOLCK.
_NO_LOCKS: Final = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)
#: States in which an element will not run any more (squeue(1), "JOB STATE CODES"). Every other
#: state, those of releases to come included, counts as alive.
_ENDED: Final = frozenset({
    "BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY",
    "PREEMPTED", "REVOKED", "TIMEOUT",
})  # fmt: skip
#: Reasons for which a job may wait for ever, where no node is down (squeue(1)).
_TOO_MUCH: Final = frozenset({"PartitionNodeLimit", "PartitionTimeLimit"})
#: Long names of sbatch's one-letter options (sbatch(1), Slurm 22.05 to 25.05) that matter to us.
_SHORT: Final = {"J": "job-name", "N": "nodes", "o": "output", "a": "array"}
#: Options of which one replaces the other.
_SAME: Final = {"no-requeue": "requeue"}
_OPTION: Final = re.compile(r"--([a-z0-9-]+)(?:[= ]|$)|-([A-Za-z])")
#: A host whose number may count (`nid007106`, `gpu-3`, `n12.cluster`); one of a list, or a range.
_COUNTED_HOST: Final = re.compile(r"(.*?)(\d{0,9})(\D*)\Z", re.DOTALL)
_LISTED_HOST: Final = re.compile(r"([^,\[\]]+)(?:\[([\d,-]*)\])?([^,\[\]]*)(?:,|$)")
#: Seconds that a busy controller may take to answer (its own MessageTimeout is 10 by default).
_ANSWER_S: Final = 60.0
#: Variables that tell clients where Slurm is (sbatch(1), "INPUT ENVIRONMENT VARIABLES").
_KEPT: Final = ("SLURM_CONF", "SLURM_CLUSTERS")


class NoAnswer(MachineError):
    """Raised when a command of Slurm was ended since it did not answer: it may have been heard."""


@dataclass(frozen=True, slots=True)
class Element:
    """A job, or one element of a job array."""

    id: str
    state: str
    #: Why it waits or ended, in Slurm's word.
    reason: str
    #: Its nodes, in Slurm's notation; empty while it waits.
    nodes: str
    #: The batch script.
    script: str

    @property
    def ended(self) -> bool:
        """Whether it has ended for good."""
        return self.state in _ENDED

    @property
    def text(self) -> str:
        """Its state, and where it runs, or why it does not."""
        if self.state == "PENDING" or self.ended:
            fix = ": more than its partition has now or allows; scancel it, and ask for less"
            why = self.reason + fix * (self.reason in _TOO_MUCH)
            return self.state + ("" if self.reason == "None" else f" ({why})")
        return self.state + (f" on {self.nodes}" if self.nodes else "")


def submit(script: Path, *options: str, fix: str) -> str:
    """Run sbatch; options given here win over the script's. Returns the job's number.

    Raises:
        NoAnswer: it may be submitted or not.
        MachineError: sbatch is not there or refuses the script; its words are in the message, and
            `fix`, what somebody can do about it.
    """
    # Inside a job, its variables would be the next job's too: its array, its memory a CPU.
    environ = {n: v for n, v in os.environ.items() if n in _KEPT or not n.startswith("SLURM_")}
    argv = ("sbatch", "--parsable", *options, str(script))
    done = capture(argv, timeout_s=_ANSWER_S, environ=environ)
    if done.returncode != 0:
        raise MachineError(f"sbatch refused {script}: {_words(done)}; {fix}")
    # "1234", or "1234;cluster".
    return done.stdout.strip().partition(";")[0]


def requeue(job: str) -> str | None:
    """Have a job run again under its number; returns None, or why Slurm refuses.

    Raises MachineError when scontrol is not there, or the controller does not answer.
    """
    done = capture(("scontrol", "requeue", job), timeout_s=_ANSWER_S)
    return None if done.returncode == 0 else _words(done)


def elements(job: str) -> tuple[Element, ...]:
    """Run squeue; one element for each of an array, pending ones too.

    Raises MachineError when the controller does not answer.
    """
    layout = ("--noheader", "--array", "--states=all", "--format=%i|%T|%r|%N|%o")
    done = capture(("squeue", f"--jobs={job}", *layout), timeout_s=_ANSWER_S)
    if done.returncode != 0:
        # Jobs are forgotten after MinJobAge (slurm.conf(5): 300 s).
        if "Invalid job id" in done.stderr:
            return ()
        raise MachineError(f"squeue says nothing about job {job}: {_words(done)}")
    return tuple(Element(*line.strip().split("|", 4)) for line in done.stdout.splitlines())


def summarise(found: tuple[Element, ...]) -> str:
    """One line about a job: how many elements are in which state, where or why (pure)."""
    counts = Counter(element.text for element in found)
    if len(found) == 1:
        return found[0].text
    return ", ".join(f"{count} {text}" for text, count in sorted(counts.items()))


@dataclass(frozen=True, slots=True)
class BatchScript:
    """A batch script that is in the queue at most once, by the numbers of its jobs.

    `NAME.jobs/1` beside it holds numbers of the jobs of the first submission, 2 of the next, and so
    on; of calls at the same time one submits: the one that creates the file.
    """

    path: Path
    #: What somebody can do about a script that is refused.
    fix: str

    def find(self) -> tuple[str, str] | None:
        """Number and state of the job that waits or runs; None where all have ended.

        Of an array whose elements were submitted again the number is several: "77,81". Raises
        MachineError where Slurm does not answer, and UserError while another call submits.
        """
        submission = self._submissions()
        if submission == 0:
            return None
        file, numbers = self._numbers(submission), list[str]()
        with suppress(FileNotFoundError):  # refused at this moment
            numbers = file.read_text(encoding="utf-8").split()
        if not numbers:
            raise _being_submitted(file)
        # Another cluster, or the same one years later, may know another job by this number.
        known = elements(",".join(numbers))
        alive = tuple(one for one in known if one.script == str(self.path) and not one.ended)
        if not alive:
            return None
        jobs = dict.fromkeys(element.id.partition("_")[0] for element in alive)
        return ",".join(jobs), summarise(alive)

    def submit(self, text: str) -> tuple[str, str]:
        """Write the script and submit it, unless a job of it is there: then that one.

        Raises as `find` and the function `submit` do.
        """
        # Before the look at the queue: where another call submits meanwhile, this file is there.
        file = self._numbers(self._submissions() + 1)
        if there := self.find():
            return there
        file.parent.mkdir(parents=True, exist_ok=True)
        try:
            file.touch(exist_ok=False)
        except FileExistsError as error:
            raise _being_submitted(file) from error
        try:
            self.path.write_text(text, encoding="utf-8")
            number = submit(self.path, fix=self.fix)
        except NoAnswer:
            raise  # it may be in the queue
        except (OSError, MachineError):
            file.unlink()
            raise
        file.write_text(f"{number}\n", encoding="utf-8")
        return number, "submitted"

    def submit_again(self, environ: Mapping[str, str]) -> None:
        """Have Slurm run the job that we are in again; where that is refused, another one after it.

        In an array only this element is queued again. Slurm ends this process soon after, so it is
        logged before. `environ` is the job's environment. Raises MachineError.
        """
        number, options = environ["SLURM_JOB_ID"], []
        if "SLURM_ARRAY_JOB_ID" in environ:
            # The number of the last element is that of the whole array.
            task = environ["SLURM_ARRAY_TASK_ID"]
            number, options = f"{environ['SLURM_ARRAY_JOB_ID']}_{task}", [f"--array={task}"]
        _log.warning("work is left: queueing job %s again", number)
        refusal = requeue(number)
        if refusal is None:
            return
        options = [f"--dependency=afterany:{number}", *options]
        follower = submit(self.path, *options, fix=self.fix)
        with self._numbers(self._submissions()).open("a", encoding="utf-8") as file:
            file.write(f"{follower}\n")
        _log.warning("job %s follows in its place, since Slurm says: %s", follower, refusal)

    def _numbers(self, submission: int) -> Path:
        return self.path.with_suffix(".jobs") / str(submission)

    def _submissions(self) -> int:
        folder = self.path.with_suffix(".jobs")
        return max((int(path.name) for path in folder.glob("[0-9]*")), default=0)


def _being_submitted(file: Path) -> UserError:
    return UserError(
        f"another call is submitting this sweep: {file} waits for its job's number; look again, or "
        "where no call is, write the number that `squeue --me` shows into it, or remove it"
    )


@contextmanager
def hold(folder: Path, *, take_over: bool) -> Iterator[None]:
    """Hold a lock in `folder` while a run lives, so that what it makes has one run at a time.

    `flock` where the file system knows it: the kernel releases that when a run dies. Elsewhere a
    file that one process alone can create names the owner, and stays when the owner dies: the same
    Slurm job, started anew, takes it over, and others do with `take_over`.

    Raises UserError when another run lives, or may live.
    """
    me = f"process {os.getpid()} on {os.uname().nodename}"
    # Unbuffered: what a full disk refuses is not tried again when the file is closed.
    with (folder / "lock").open("a+b", buffering=0) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            lock.seek(0)
            owner = lock.read().decode(errors="replace").strip() or "another process"
            raise UserError(
                f"{owner} is running this sweep into this directory already; wait for it, stop it, "
                "or take another --out"
            ) from error
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        else:
            lock.truncate(0)
            lock.write(f"{me}\n".encode())
            yield
            return
    path = folder / "owner"
    mine = _own(path, me, take_over=take_over)
    try:
        yield
    finally:
        if _text(path) == mine:
            path.unlink(missing_ok=True)


def _own(path: Path, process: str, *, take_over: bool) -> str:
    """Make the owner's file ours; returns what is in it."""
    #   SLURM_RESTART_COUNT  Slurm: how often the job was requeued.
    restart = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
    job = os.environ.get("SLURM_JOB_ID")
    text = json.dumps({"job": job, "restart": restart, "process": process})
    with suppress(FileExistsError), path.open("x", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
        return text
    owner = {"process": "another process"}
    with suppress(json.JSONDecodeError):  # cut short by a full disk, or given back just now
        owner |= json.loads(_text(path))
    is_ours = job is not None and owner.get("job") == job
    if not take_over and not (is_ours and int(owner.get("restart", 0)) < restart):
        raise UserError(
            f"{owner['process']} (job {owner.get('job')}) may be running this sweep: {path} is "
            "its, and there are no locks here that would tell; wait for it, or where you know "
            "that it is gone, add --take-over"
        )
    _log.warning("taking this sweep over from %s", owner["process"])
    with replacing(path, is_synced=True) as hidden:
        hidden.write_text(text, encoding="utf-8")
    return text


def _text(path: Path) -> str:
    with suppress(FileNotFoundError):
        return path.read_text(encoding="utf-8", errors="replace")
    return ""


def option_name(line: str) -> str | None:
    """The long name of the sbatch option that a line sets; None when it sets none.

    >>> option_name("#SBATCH -N 2"), option_name("--no-requeue"), option_name("fast, please")
    ('nodes', 'requeue', None)
    """
    found = _OPTION.match(bare_option(line))
    if found is None or "\n" in line:
        return None
    name = found[1] or _SHORT.get(found[2], found[2])
    return _SAME.get(name, name)


def bare_option(line: str) -> str:
    """An option line without its `#SBATCH` mark."""
    return line.strip().removeprefix("#SBATCH").strip()


def quoted(value: str) -> str:
    """A value quoted for an option line."""
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def capture(
    argv: tuple[str, ...], *, timeout_s: float, environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a short command, e.g. squeue, to its end, in our environment or another.

    Raises:
        NoAnswer: it does not end in time.
        MachineError: it is not there.
    """
    try:
        return subprocess.run(
            argv,
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            start_new_session=True,
        )
    except OSError as error:
        raise MachineError(f"cannot start '{argv[0]}': {error.strerror}; install it") from error
    except subprocess.TimeoutExpired as error:
        raise NoAnswer(f"no answer from '{' '.join(argv)}' in {timeout_s:g} s") from error


def _words(done: subprocess.CompletedProcess[str]) -> str:
    return " | ".join((done.stderr or done.stdout).strip().splitlines()) or "no message"


def host_list(hosts: Iterable[str]) -> str:
    """The hosts as Slurm lists them, each once; runs of consecutive numbers become a range.

    >>> host_list(["n01", "n02", "n03", "n07", "login", "n7"])
    'n[01-03],n07,login,n7'
    """
    told, numbered = list[str](), list[tuple[tuple[str, str, int, int], str]]()
    for place, host in enumerate(dict.fromkeys(hosts)):
        head, digits, tail = _COUNTED_HOST.findall(host)[0]
        numbered.append(((head, tail, len(digits), int(digits or 0) - place), digits))
    for (head, tail, *_), alike in groupby(numbered, itemgetter(0)):
        numbers = [digits for _, digits in alike]
        number = numbers[0] if len(numbers) == 1 else f"[{numbers[0]}-{numbers[-1]}]"
        told.append(f"{head}{number}{tail}")
    return ",".join(told)


def expand_hosts(text: str) -> list[str]:
    """The hosts of such a list, in order.

    >>> expand_hosts('n[01-03,7],login')
    ['n01', 'n02', 'n03', 'n7', 'login']
    """
    names: list[str] = []
    for head, inside, tail in _LISTED_HOST.findall(text):
        if not inside:
            names.append(head + tail)
        for part in filter(None, inside.split(",")):
            low, _, high = part.partition("-")
            numbers = range(int(low), int(high or low) + 1)
            names += [f"{head}{number:0{len(low)}d}{tail}" for number in numbers]
    return names
