"""`dynamiccl-deploy brain`: the process that a leader asks what a running job should do next.

Questions come a line of JSON each on stdin, answers go to stdout: `serve/plugin/brain/message.h`.
The leader starts it (DYNAMICCL_BRAIN) and kills one that does not answer in time.

A policy is an object with `decide(config, history)`; one is made for each communicator by
`make(artifact)`: ours by name, or yours by `--policy my_module:make`. It proposes whole tables; the
plugin checks every table, and all ranks agree on it before it takes effect.

Two of ours are tuners of `serve/search`. The leader asks a brain every DYNAMICCL_ADAPT_INTERVAL_S,
with the latest calls of each task key. So a probe lasts for one interval and not for one call: the
interval is the cost of a slow probe. New calls in a window that certainly ran the requested config
are passed to the tuner; its next request goes into the returned table, on which all ranks agree
before it takes effect. Only knobs that NCCL takes call by call are searched: algorithm, protocol,
channels, and chunk size where the artifact's NCCL supports it; and only configs that were measured
near a size.
"""

import ctypes
import importlib
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import typer

from dynamiccl import cli
from dynamiccl.datasets.features import TUNED, Observations
from dynamiccl.datasets.history import UNKNOWN, WINDOW_LENGTH, Call
from dynamiccl.datasets.manifest import BRAIN_NAME, POLICY_NAME
from dynamiccl.datasets.questions import allowed, cold_questions, table_supports
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config
from dynamiccl.nccl import Protocol as NcclProtocol
from dynamiccl.schedule import config_columns
from dynamiccl.serve.artifact import Artifact, open_artifact, pick_table
from dynamiccl.serve.search.autoccl import (
    AutoCcl,
    Choice,
    Key,
    SearchSpace,
    SpaceOf,
    Tuner,
    is_disturbed,
)
from dynamiccl.serve.search.policy_search import PolicySearch, Prior, Rules, predicted
from dynamiccl.serve.table import MAX_BINS, DecisionTable
from dynamiccl.serve.torchscript import (
    BrainConfig,
    History,
    KeyCalls,
    ScriptedBrain,
    ScriptedPolicy,
)
from dynamiccl.sizes import bin_center_bytes

#: Timed calls with one config before it is judged.
MIN_CALLS: Final = 3
#: Fewer calls than usual per measurement, since a window shows only the latest calls.
RULES: Final = Rules(watch_calls=MIN_CALLS, rest_calls=0)

_PR_SET_PDEATHSIG: Final = 1
_log = logging.getLogger(__name__)

PriorOf = Callable[[Key], Prior]
MakeTuner = Callable[[SpaceOf, PriorOf], Tuner]


class Brain(Protocol):
    """The interface of a policy for one communicator."""

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The table that should be in force next; None keeps the current one.

        An exception is logged and sent to the leader, which keeps its table.
        """
        ...


class PolicyBrain:
    """The artifact's policy on the live history, as the plugin runs it inside a job."""

    def __init__(self, artifact: Artifact) -> None:
        """Load `brain.pt`; raises UserError for an artifact of an older release."""
        artifact.refuse_slack("which no brain knows")
        path = artifact.directory / BRAIN_NAME
        if not path.is_file():
            raise UserError(
                f"{artifact.directory} has no {BRAIN_NAME}; export it again with this release"
            )
        self._brain = ScriptedBrain(path)

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The policy's table for all task keys; None for an unknown shape."""
        return self._brain.decide(config, history.tasks)


# --- Searches ---


def in_force(table: DecisionTable | None, task: KeyCalls) -> Config:
    """The config that the plugin requests for a task now."""
    found = table.at(task.collective, task.bin) if table else None
    return found or ABSTAIN


def latest_config(calls: Sequence[Call]) -> list[Call]:
    """The calls since the latest change of config, oldest first."""
    last = calls[-1] if calls else None
    same = takewhile(lambda call: last is not None and _used(call) == _used(last), reversed(calls))
    return list(same)[::-1]


def may_have_run(config: Config, call: Call) -> bool:
    """Whether `call` can have run under `config`; channels are ignored: they are a maximum."""
    return config.algorithm in {None, call.algorithm} and config.protocol in {None, call.protocol}


def _used(call: Call) -> tuple[object, ...]:
    return call.algorithm, call.protocol, call.num_channels


@dataclass(slots=True)
class _Progress:
    """One task key: the action that was requested, the calls that its tuner was told of."""

    playing: int
    num_told: int = 0
    is_disturbed: bool = False


class TunerBrain:
    """Runs a tuner for the task keys of one communicator."""

    def __init__(
        self, artifact: Artifact, make_tuner: MakeTuner, *, from_table: bool, alarmed: bool = False
    ) -> None:
        """Search what `artifact` measured, from its table on or from NCCL's own choice.

        `alarmed` tuners are told of the interference that the artifact's Trigger finds. Raises
        MachineError then without torch, and UserError for an artifact with slack: searches want
        what is fastest.
        """
        artifact.refuse_slack("which no search keeps to")
        self._artifact = artifact
        self._configs = artifact.manifest.actions().configs
        self._from_table = from_table
        self._tuner = make_tuner(self._space, self._prior)
        self._spaces: dict[Key, SearchSpace] = {}
        self._watcher = ScriptedBrain(artifact.directory / BRAIN_NAME) if alarmed else None
        self._progress: dict[tuple[Collective, int], _Progress] = {}
        #: What it began with, once the communicator is known.
        self._table: DecisionTable | None = None
        #: The policy's values without history, once they are asked for.
        self._q: npt.NDArray[np.float32] | None = None

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The table with the tuner's requested config for each task key that has a history.

        Raises UnknownName for a communicator shape that the artifact does not have.
        """
        if self._table is None:
            self._table = self._begin(config, history.table)
        first, num_bins = self._table.first_bin, self._table.num_bins
        tasks = [task for task in history.tasks if 0 <= task.bin - first < num_bins]
        for task, levels in zip(tasks, self._levels(tasks), strict=True):
            self._learn(task, in_force(history.table, task), levels)
        entries = self._table.entries.copy()
        for (collective, index), found in self._progress.items():
            entries[collective, index - first] = config_columns(self._configs[found.playing])
        table = replace(self._table, entries=entries)
        return None if table == history.table else table

    def _begin(self, config: BrainConfig, found: DecisionTable | None) -> DecisionTable:
        """The table that a search of a communicator begins with, whose actions are looked up.

        A job begins with its artifact's table in force; another one was found by a brain before
        this one, and is kept.
        """
        manifest = self._artifact.manifest
        info = pick_table(self._artifact, config.num_nodes, config.num_ranks, config.system)
        table = DecisionTable.read(self._artifact.directory / info.path)
        self._support = table_supports(manifest)[self._artifact.tables.index(info)]
        bins = range(table.first_bin, table.first_bin + table.num_bins)
        #: Which may be played, [collective][bin][action].
        self._mask = np.stack([allowed(manifest, self._support, c, bins) for c in TUNED])
        if found not in {None, table}:
            return found
        entries = table.entries.copy()
        if not self._from_table:
            entries[:] = config_columns(ABSTAIN)
        return replace(table, entries=entries)

    def _levels(self, tasks: Sequence[KeyCalls]) -> npt.NDArray[np.float64]:
        """(N, K) interference of the calls of N task keys, right-aligned; -1: unknown."""
        if self._watcher is None or not tasks:
            return np.full((len(tasks), WINDOW_LENGTH), UNKNOWN, dtype=np.float64)
        rows = np.array([task.collective * MAX_BINS + task.bin for task in tasks])
        return self._watcher.interference(tasks, rows)

    def _learn(
        self,
        task: KeyCalls,
        running: Config,
        levels: npt.NDArray[np.float64],
    ) -> None:
        key = (task.collective, task.bin)
        if key not in self._progress:
            self._spaces[key] = self._open_space(task, running)
            self._progress[key] = _Progress(self._tuner.ask(key))
        progress = self._progress[key]
        before = progress.is_disturbed
        for level in levels[len(levels) - len(task.calls) :].tolist():
            progress.is_disturbed = is_disturbed(level, before=progress.is_disturbed)
        if progress.is_disturbed != before:
            self._tuner.alarm(key)
            progress.playing = self._tuner.ask(key)
        if running != self._configs[progress.playing]:
            return  # the table with it is not in force yet
        told = progress.num_told if task.num_timed is None else task.num_timed
        fresh = len(task.calls) if task.num_timed is None else told - progress.num_told
        calls = [call for call in latest_config(task.calls) if may_have_run(running, call)]
        calls = calls[max(len(calls) - fresh, 0) :]
        if len(calls) < MIN_CALLS:
            return
        progress.num_told = told
        size_bytes = bin_center_bytes(task.bin)
        for call in calls:
            time_us = call.time_us * size_bytes / call.size_bytes
            self._tuner.tell(key, time_us, progress.playing)
        progress.playing = self._tuner.ask(key)

    def _open_space(self, task: KeyCalls, running: Config) -> SearchSpace:
        assert self._table is not None
        mask = self._mask[task.collective, task.bin - self._table.first_bin]
        last = task.calls[-1]
        ran = Config(last.algorithm, last.protocol, last.num_channels)
        begin, playable = in_force(self._table, task), np.flatnonzero(mask).tolist()
        is_played = begin in [self._configs[action] for action in playable]
        return SearchSpace(
            [Choice(config) for config in self._configs],
            playable,
            default_runs=Choice(ran) if running == ABSTAIN else None,
            begin=Choice(begin if is_played else ABSTAIN),
        )

    def _space(self, key: Key) -> SearchSpace:
        return self._spaces[key]

    def _prior(self, key: Key) -> Prior:
        """The policy's prediction for a (collective, size bin), without history."""
        assert self._table is not None
        assert isinstance(key, tuple)
        if self._q is None:
            asked = cold_questions(self._artifact.manifest, self._support)
            policy = ScriptedPolicy(self._artifact.directory / POLICY_NAME)
            self._q = policy.values(Observations.cold(asked.context), asked.mask)
        collective, index = key
        q = self._q[collective * self._table.num_bins + index - self._table.first_bin]
        return Prior.of_policy(self._spaces[key], bin_center_bytes(index), predicted(q))


def autoccl_brain(artifact: Artifact) -> TunerBrain:
    """AutoCCL's search, from NCCL's own choice."""
    return TunerBrain(
        artifact, lambda space_of, _: AutoCcl(space_of, repeats=MIN_CALLS), from_table=False
    )


def search_brain(artifact: Artifact) -> TunerBrain:
    """Our search, from the artifact's table; raises MachineError without torch."""
    ScriptedPolicy(artifact.directory / POLICY_NAME)  # what is wrong with it shows now
    return TunerBrain(
        artifact,
        lambda space_of, prior_of: PolicySearch(space_of, prior_of, RULES),
        from_table=True,
        alarmed=True,
    )


# --- The command ---

MakeBrain = Callable[[Artifact], Brain]
POLICIES: Final[Mapping[str, MakeBrain]] = {
    "artifact": PolicyBrain,
    "autoccl": autoccl_brain,
    "search": search_brain,
}


def find_policy_maker(name: str) -> MakeBrain:
    """A built-in policy's maker, or `module:function` of your own.

    Raises UnknownName and UserError.
    """
    if ":" not in name:
        if name not in POLICIES:
            raise UnknownName("policy", name, [*POLICIES, "module:function"], where="--policy")
        return POLICIES[name]
    module_name, _, attribute = name.partition(":")
    try:
        maker = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"--policy {name} cannot be imported: {error}; is its directory in PYTHONPATH?"
        ) from error
    found: MakeBrain = maker
    return found


def brain_command(
    policy: Annotated[
        str, typer.Option(help=f"One of {', '.join(POLICIES)}, or module:function of your own.")
    ],
) -> None:
    """Answer the leader of a job in mode `adaptive`: questions on stdin, answers on stdout.

    The leader runs it, where the first rank starts; its folder is /, and what it logs is lost but
    for `2> FILE`. Stopped or slow, it leaves every communicator the table that it has.

    Example: DYNAMICCL_BRAIN='dynamiccl-deploy brain --policy search'
    """
    # What a shell has started is not killed with the shell.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's; the processors are the job's
    cli.configure_logging(verbose=False)
    if sys.stdin.isatty():
        find_policy_maker(policy)  # a person is told at once

    def make(artifact: Artifact) -> Brain:
        return find_policy_maker(policy)(artifact)  # the leader hears what is wrong with it

    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what a policy prints is no answer
        for line in answers(sys.stdin.buffer, make):
            print(line, file=out, flush=True)


def answers(questions: Iterable[bytes], make: MakeBrain) -> Iterator[str]:
    """Answer questions line by line. Each brain that is named is one that `make` has made.

    Of an exception, in a policy or in a question, the leader is told, and keeps its table.
    """
    brains: dict[int, Brain] = {}
    for line in questions:
        told: dict[str, Any] = {}
        try:
            told = dict(json.loads(os.fsdecode(line)))  # paths may be no UTF-8
            for gone in told["forgotten"]:
                brains.pop(gone, None)
            name = told["brain"]
            if name not in brains:
                brains[name] = make(open_artifact(Path(told["artifact"])))
            brain = brains[name]
            config = BrainConfig(told["system"], told["num_nodes"], told["num_ranks"])
            table = brain.decide(config, read_history(told["table"], told["tasks"]))
            answer = {} if table is None else {"table": table.to_bytes().hex()}
        except Exception as error:
            _log.exception("the table in force stays")
            answer = {"error": f"{type(error).__name__}: {error}"}
        yield json.dumps({"number": told.get("number"), **answer})


def read_history(table: str, tasks: Sequence[Sequence[Any]]) -> History:
    """A question's table and tasks. Raises CorruptFile, TypeError and ValueError."""
    in_force = DecisionTable.from_bytes(bytes.fromhex(table)) if table else None
    keys = (
        KeyCalls(
            Collective(collective),
            index,
            tuple(map(_read_call, calls)),
            None if num_timed == UNKNOWN else num_timed,
        )
        for collective, index, num_timed, calls in tasks
    )
    return History(tuple(keys), in_force)


def _read_call(facts: Sequence[Any]) -> Call:
    size_bytes, time_us, algorithm, protocol, num_channels, skew_us = facts
    return Call(
        size_bytes=size_bytes,
        time_us=time_us,
        algorithm=None if algorithm == UNKNOWN else Algorithm(algorithm),
        protocol=None if protocol == UNKNOWN else NcclProtocol(protocol),
        num_channels=num_channels or None,
        skew_us=None if skew_us == UNKNOWN else skew_us,
    )
