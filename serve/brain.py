"""`dynamiccl-deploy brain`: the process that a leader asks what a running job should do next.

Questions and answers are lines of JSON: `serve/plugin/brain/message.h`. The leader starts it
(DYNAMICCL_BRAIN), and kills one that does not answer in time. A policy is an object with
`decide(config, history)`, made for each communicator by `make(artifact)`: ours by name, yours by
`--policy my_module:make`. The plugin checks the proposed table; all ranks agree on it.

A tuner of `serve/search` is told of new calls that certainly ran what it requested, and searches
what NCCL takes call by call, of what was measured near a size. Torch is loaded only with a
TorchScript file.
"""

import importlib
import json
import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Final, Protocol

import numpy as np
import numpy.typing as npt
import typer

from dynamiccl.datasets.features import TUNED, Observations
from dynamiccl.datasets.history import UNKNOWN, WINDOW_LENGTH, Call, CallColumns
from dynamiccl.datasets.manifest import BRAIN_NAME
from dynamiccl.datasets.questions import allowed, cold_questions
from dynamiccl.errors import ArtifactMismatch, CorruptFile, UnknownName, UserError
from dynamiccl.files import end_with_parent
from dynamiccl.nccl import ABSTAIN, Algorithm, Collective, Config
from dynamiccl.nccl import Protocol as NcclProtocol
from dynamiccl.schedule import config_columns
from dynamiccl.serve.artifact import Artifact, open_artifact
from dynamiccl.serve.search import autoccl
from dynamiccl.serve.search.policy_search import PolicySearch, Prior, predicted
from dynamiccl.serve.table import ENTRY, MAX_BINS, DecisionTable
from dynamiccl.sizes import bin_center_bytes

#: What `brain.pt` wants of a call, as float64; unknown is -1, of channels 0.
CALL_COLUMNS: Final = ("valid", *CallColumns.__slots__)
#: Timed calls with one config before it is judged.
MIN_CALLS: Final = 3

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BrainConfig:
    """The communicator that asks."""

    system: str
    num_nodes: int
    num_ranks: int


@dataclass(frozen=True, slots=True)
class KeyCalls:
    """A (collective, size bin) and its latest calls."""

    collective: Collective
    bin: int
    #: Oldest first, at most WINDOW_LENGTH.
    calls: tuple[Call, ...]
    #: Calls timed so far; None: `calls` are old, and the choice in force was withdrawn by them.
    num_timed: int | None = None


@dataclass(frozen=True, slots=True)
class History:
    """A communicator's task keys with their latest calls."""

    tasks: tuple[KeyCalls, ...]
    #: In force; None: NCCL's own choice everywhere.
    table: DecisionTable | None


class ScriptedBrain:
    """A loaded `brain.pt`; raises CorruptFile."""

    def __init__(self, path: Path) -> None:
        from dynamiccl.train.policy import load_script

        self._path = path
        self._module: Any = load_script(path) if path.is_file() else None
        if not hasattr(self._module, "decide"):
            raise CorruptFile(
                f"{path} is not there, or of an older release; export the artifact again"
            )

    def _run(self, method: str, *told: Any) -> npt.NDArray[Any]:
        import torch

        arrays = [torch.from_numpy(a) if isinstance(a, np.ndarray) else a for a in told]
        with torch.no_grad():
            found: npt.NDArray[Any] = getattr(self._module, method)(*arrays).numpy()
        return found

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The table; None: unknown shape. Raises ArtifactMismatch for what NCCL cannot run."""
        found = self._module.find_shape(config.system, config.num_nodes, config.num_ranks)
        if not found:
            return None
        shape, num_nodes, num_ranks, _, first_bin, num_bins = found
        warm = [t for t in history.tasks if t.calls and 0 <= t.bin - first_bin < num_bins]
        rows = [t.collective * num_bins + t.bin - first_bin for t in warm]
        columns = self._run("decide", shape, *_told(warm, rows))
        entries = np.array([tuple(row) for row in columns], dtype=ENTRY)
        try:
            return DecisionTable(
                num_nodes=num_nodes,
                num_ranks=num_ranks,
                first_bin=first_bin,
                entries=entries.reshape(-1, num_bins),
            )
        except ValueError as error:
            raise ArtifactMismatch(
                f"{self._path} decides what NCCL cannot run: {error}; export the artifact again"
            ) from error

    def act(
        self,
        calls: npt.NDArray[np.float64],
        context: npt.NDArray[np.float32],
        mask: npt.NDArray[np.bool_],
    ) -> npt.NDArray[np.int64]:
        """(N,) actions in new jobs for `raw_calls`, cold contexts (N, F) and masks (N, A)."""
        return self._run("forward", calls, context, mask.astype(np.float32))

    def interference(self, tasks: Sequence[KeyCalls]) -> npt.NDArray[np.float64]:
        """(N, K) interference of N task keys' calls; -1: unknown. Remembers their windows."""
        rows = [task.collective * MAX_BINS + task.bin for task in tasks]
        filled = self._run("watch", *_told(tasks, rows))
        return filled[:, :, CALL_COLUMNS.index("interference")]


def _told(tasks: Sequence[KeyCalls], rows: Sequence[int]) -> list[npt.NDArray[Any]]:
    timed = [UNKNOWN if t.num_timed is None else t.num_timed for t in tasks]
    calls = raw_calls([task.calls for task in tasks])
    return [np.array(rows, dtype=np.int64), calls, np.array(timed, dtype=np.int64)]


def raw_calls(windows: Sequence[Sequence[Call]]) -> npt.NDArray[np.float64]:
    """(N, WINDOW_LENGTH, len(CALL_COLUMNS)) of latest calls, right-aligned."""
    raw = np.zeros((len(windows), WINDOW_LENGTH, len(CALL_COLUMNS)), dtype=np.float64)
    for row, calls in zip(raw, windows, strict=True):
        recent = CallColumns.of(calls[-WINDOW_LENGTH:])
        row[WINDOW_LENGTH - len(recent) :] = columns_of(recent, np.ones(len(recent), np.bool_))
    return raw


def columns_of(calls: CallColumns, is_valid: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Facts of calls in one array (..., len(CALL_COLUMNS)); those that are not valid are 0."""
    facts = [is_valid, *(getattr(calls, name) for name in CallColumns.__slots__)]
    return np.stack(facts, axis=-1).astype(np.float64) * is_valid[..., None]


class Brain(Protocol):
    """The interface of a policy for one communicator."""

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The next table; None, or an exception (logged, sent to the leader), keeps it."""


def policy_brain(artifact: Artifact) -> Brain:
    """The artifact's policy on the live history; raises UserError, and as `ScriptedBrain`."""
    artifact.refuse_slack("which no brain knows")
    return ScriptedBrain(artifact.directory / BRAIN_NAME)


@dataclass(slots=True)
class _Progress:
    """The calls that the tuner was told of, and whether the last was disturbed."""

    num_told: int = 0
    is_disturbed: bool = False


class TunerBrain:
    """Runs a tuner for the task keys of one communicator.

    Ours begins with the artifact's table, hears of interference by its Trigger and needs torch;
    AutoCCL's begins with NCCL's choice. Both go on from another table in force. Slack raises
    UserError.
    """

    def __init__(self, artifact: Artifact, *, is_ours: bool = False) -> None:
        artifact.refuse_slack("which no search keeps to")
        self._artifact, self._is_ours = artifact, is_ours
        self._configs = artifact.manifest.actions().configs
        self._spaces: dict[autoccl.Key, autoccl.SearchSpace] = {}
        self._progress: dict[tuple[Collective, int], _Progress] = {}
        self._tuner: autoccl.Tuner
        if is_ours:
            from dynamiccl.train.policy import TorchPolicy

            self._policy = TorchPolicy.load(artifact.directory)
            self._watcher = ScriptedBrain(artifact.directory / BRAIN_NAME)
            # A measurement takes few calls: a window shows only the latest.
            calls = {"watch_calls": MIN_CALLS, "rest_calls": 0}
            self._tuner = PolicySearch(self._spaces.__getitem__, self._prior, **calls)
        else:
            self._tuner = autoccl.AutoCcl(self._spaces.__getitem__, repeats=MIN_CALLS)
        self._table: DecisionTable | None = None

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The table with requested configs; raises UnknownName for a shape without a table."""
        if self._table is None:
            self._table = self._begin(config, history.table)
        first, num_bins = self._table.first_bin, self._table.num_bins
        tasks = [task for task in history.tasks if 0 <= task.bin - first < num_bins]
        levels = np.full((len(tasks), WINDOW_LENGTH), UNKNOWN, dtype=np.float64)
        if self._is_ours and tasks:
            levels = self._watcher.interference(tasks)
        for task, of_task in zip(tasks, levels, strict=True):
            self._learn(task, _requested(history.table, task), of_task)
        entries = self._table.entries.copy()
        for collective, index in self._progress:
            asked = self._configs[self._tuner.ask((collective, index))]
            entries[collective, index - first] = config_columns(asked)
        table = replace(self._table, entries=entries)
        return None if table == history.table else table

    def _begin(self, config: BrainConfig, found: DecisionTable | None) -> DecisionTable:
        """The artifact's table, or another of its bins that is in force.

        A brain before found that one, or it was installed since.
        """
        manifest = self._artifact.manifest
        shape = config.num_nodes, config.num_ranks
        self._support, table = self._artifact.pick(*shape, config.system)
        bins = range(table.first_bin, table.first_bin + table.num_bins)
        #: Which may be played, [collective][bin][action].
        self._mask = np.stack([allowed(manifest, self._support, c, bins) for c in TUNED])
        if self._is_ours:
            asked = cold_questions(manifest, self._support)
            self._q = self._policy.values(Observations.cold(asked.context), asked.mask)
        its_bins = table.first_bin, table.num_bins
        if found and found != table and (found.first_bin, found.num_bins) == its_bins:
            return found
        entries = table.entries.copy()
        if not self._is_ours:
            entries[:] = config_columns(ABSTAIN)
        return replace(table, entries=entries)

    def _learn(self, task: KeyCalls, running: Config, levels: npt.NDArray[np.float64]) -> None:
        """Tell the tuner of calls of what it asked for, and of a change of interference."""
        key = (task.collective, task.bin)
        if key not in self._progress:
            self._spaces[key] = self._open_space(task, running)
            self._progress[key] = _Progress()
        progress = self._progress[key]
        before = progress.is_disturbed
        for level in levels[len(levels) - len(task.calls) :].tolist():
            progress.is_disturbed = autoccl.is_disturbed(level, before=progress.is_disturbed)
        if progress.is_disturbed != before:
            self._tuner.alarm(key)
        asked = self._tuner.ask(key)
        if running != self._configs[asked]:
            return  # the table with it is not in force yet
        told = progress.num_told if task.num_timed is None else task.num_timed
        fresh = len(task.calls) if task.num_timed is None else told - progress.num_told
        calls = _of_latest_config(running, task.calls)
        calls = calls[max(len(calls) - fresh, 0) :]
        if len(calls) < MIN_CALLS:
            return
        progress.num_told = told
        size_bytes = bin_center_bytes(task.bin)
        for call in calls:
            self._tuner.tell(key, call.time_us * size_bytes / call.size_bytes, asked)

    def _open_space(self, task: KeyCalls, running: Config) -> autoccl.SearchSpace:
        assert self._table is not None
        mask = self._mask[task.collective, task.bin - self._table.first_bin]
        last = task.calls[-1]
        ran = Config(last.algorithm, last.protocol, last.num_channels)
        begin, playable = _requested(self._table, task), np.flatnonzero(mask).tolist()
        is_played = begin in [self._configs[action] for action in playable]
        return autoccl.SearchSpace(
            [autoccl.Choice(config) for config in self._configs],
            playable,
            default_runs=autoccl.Choice(ran) if running == ABSTAIN else None,
            begin=autoccl.Choice(begin if is_played else ABSTAIN),
        )

    def _prior(self, key: autoccl.Key) -> Prior:
        assert self._table is not None
        assert isinstance(key, tuple)
        collective, index = key
        q = self._q[collective * self._table.num_bins + index - self._table.first_bin]
        return Prior.of_policy(self._spaces[key], bin_center_bytes(index), predicted(q))


def _requested(table: DecisionTable | None, task: KeyCalls) -> Config:
    found = table.at(task.collective, task.bin) if table else None
    return found or ABSTAIN


def _of_latest_config(running: Config, calls: Sequence[Call]) -> list[Call]:
    """The latest calls under one config that `running` can come to; its channels are a maximum."""
    ran = [(call.algorithm, call.protocol, call.num_channels) for call in calls]
    latest = list(takewhile(lambda of: of == ran[-1], reversed(ran)))
    return [
        call
        for call in calls[len(calls) - len(latest) :]
        if running.algorithm in {None, call.algorithm} and running.protocol in {None, call.protocol}
    ]


MakeBrain = Callable[[Artifact], Brain]
POLICIES: Final[Mapping[str, MakeBrain]] = {
    "artifact": policy_brain,
    "autoccl": TunerBrain,
    "search": partial(TunerBrain, is_ours=True),
}


def find_policy_maker(name: str) -> MakeBrain:
    """A built-in policy's maker, or `module:function`; raises UnknownName and UserError."""
    if ":" not in name:
        if name not in POLICIES:
            raise UnknownName("policy", name, [*POLICIES, "module:function"], where="--policy")
        return POLICIES[name]
    module_name, _, attribute = name.partition(":")
    try:
        maker: MakeBrain = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"--policy {name} cannot be imported: {error}; is its directory in PYTHONPATH?"
        ) from error
    return maker


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
    # Killing a shell does not kill what it has started.
    end_with_parent()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # torch's; the processors are the job's
    if sys.stdin.isatty():
        find_policy_maker(policy)  # a person is told at once

    def make(artifact: Artifact) -> Brain:
        return find_policy_maker(policy)(artifact)  # the leader hears what is wrong

    with os.fdopen(os.dup(1), "w") as out:
        os.dup2(2, 1)  # what a policy prints is no answer
        for line in answers(sys.stdin.buffer, make):
            print(line, file=out, flush=True)


def answers(questions: Iterable[bytes], make: MakeBrain) -> Iterator[str]:
    """Answer each line, an exception with its text; each brain that is named is `make`'s."""
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
    """A question's table and tasks; raises CorruptFile, TypeError and ValueError."""
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
