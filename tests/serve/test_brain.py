"""The brain process: its answers line by line, and the policies that it can run."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.datasets.history import Call
from dynamiccl.errors import CorruptFile, UnknownName, UserError
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.serve.artifact import Artifact
from dynamiccl.serve.brain import (
    POLICIES,
    BrainConfig,
    History,
    KeyCalls,
    ScriptedBrain,
    answers,
    find_policy_maker,
    read_history,
)
from dynamiccl.serve.export import export_artifact
from dynamiccl.serve.search.policy_search import PolicySearch
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import size_bin
from dynamiccl.train.policy import save_script
from dynamiccl.train.trigger import TriggerModule
from tests.cluster.slurm import wait_until
from tests.serve.brains import (
    CONFIG,
    FIRST_BIN,
    NOTHING,
    NUM_BINS,
    SIZES,
    HintPolicy,
    Leader,
    make_artifact,
    question_of,
    table_in,
    task,
)

SIZE = 1 << 20
BIN = size_bin(SIZE)
KEY = (Collective.AllReduce, BIN)


class CountingBrain:
    """Answers with a table whose number of ranks is how often it was asked."""

    def __init__(self, artifact: Artifact) -> None:
        self.artifact = artifact
        self.asked = 0

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        assert history == NOTHING
        self.asked += 1
        if config.system == "fail":
            raise ValueError("no idea")
        if config.system == "keep":
            return None
        return DecisionTable.from_configs([[None]] * 5, num_nodes=1, num_ranks=self.asked)


def asked(artifact: Artifact, *questions: tuple[int, str], **last: Any) -> list[Any]:
    """The answers to one stream of (brain, system); `last` is in its last question alone."""
    told = [
        question_of(artifact.directory, BrainConfig(system, 1, 8), number=n, brain=brain)
        for n, (brain, system) in enumerate(questions, 7)
    ]
    told[-1] |= last
    lines = [json.dumps(question).encode() for question in told]
    found = [json.loads(line) for line in answers(lines, CountingBrain)]
    assert [answer["number"] for answer in found] == [*range(7, 7 + len(lines))]
    return found


def test_each_communicator_has_a_brain_of_its_own(small_artifact: Artifact) -> None:
    """However many there are; one that is forgotten is no more."""
    turns = [brain for _ in range(3) for brain in range(40)]
    found = asked(small_artifact, *((brain, "box") for brain in turns))
    assert [table_in(answer).num_ranks for answer in found] == [
        n for n in (1, 2, 3) for _ in range(40)
    ]
    found = asked(small_artifact, *((brain, "box") for brain in (1, 2, 1)), forgotten=[1, 77])
    assert [table_in(answer).num_ranks for answer in found] == [1, 1, 1]


def test_policy_that_fails_is_an_error_and_is_asked_again(small_artifact: Artifact) -> None:
    keeps, failed, answer = asked(small_artifact, (1, "keep"), (1, "fail"), (1, "box"))
    assert keeps == {"number": 7}
    assert failed == {"number": 8, "error": "ValueError: no idea"}
    assert table_in(answer).num_ranks == 3


CALL = Call(1 << 20, 50.0, Algorithm.Ring, Protocol.LL, 8, skew_us=2.5)
UNKNOWN_CALL = Call(1 << 20, 50.125, None, None, None)


def test_question_is_read_as_it_was_written(small_artifact: Artifact, tmp_path: Path) -> None:
    tasks = (
        KeyCalls(Collective.AllReduce, 80, (CALL, UNKNOWN_CALL), 17),
        KeyCalls(Collective.Broadcast, 0, (), None),
        KeyCalls(Collective.AllGather, 248, (CALL,) * 8, 1000),
    )
    for history in (History(tasks, own_table(small_artifact)), NOTHING):
        told = question_of(small_artifact.directory, CONFIG, history)
        assert read_history(told["table"], told["tasks"]) == history
    # A path may be no UTF-8.
    strange = tmp_path / os.fsdecode(b"\xff\xc3\xa9")
    strange.symlink_to(small_artifact.directory)
    line = os.fsencode(json.dumps(question_of(strange, CONFIG), ensure_ascii=False))
    assert b"\xff" in line
    assert "table" in json.loads(next(answers([line], CountingBrain)))


def test_impossible_question_is_an_error(small_artifact: Artifact) -> None:
    told = question_of(small_artifact.directory, CONFIG)
    spoilt: tuple[tuple[dict[str, Any], str], ...] = (
        ({"artifact": "/none"}, "manifest.json"),
        ({"brain": []}, "unhashable"),
        ({"tasks": [[77, 80, 1, []]]}, "77 is not a valid Collective"),
        ({"tasks": [[4, 80, 1, [[1, 1, 77, 1, 1, -1]]]]}, "77 is not a valid Algorithm"),
        ({"tasks": [[4, 80, 1, [[1, 1]]]]}, "not enough values"),
        ({"table": "00"}, "the table"),
    )
    for spoil, why in spoilt:
        lines = [json.dumps(told | spoil).encode(), json.dumps(told).encode()]
        bad, good = (json.loads(line) for line in answers(lines, CountingBrain))
        assert bad["number"] == good["number"] == 1
        assert why in bad["error"]
        assert "table" in good
    for line in (b"", b"\xff", b"GET /", b"[1]", b"{}"):
        answer = json.loads(next(answers([line], CountingBrain)))
        assert (answer["number"], bool(answer["error"])) == (None, True)


def test_command_answers_line_by_line_with_a_policy_of_ones_own(
    small_artifact: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the policy prints is no answer, what is wrong with it is one.

    It takes one core, and ends with its stdin.
    """
    (tmp_path / "my_search.py").write_text(
        "class Mine:\n"
        "    def decide(self, config, history):\n"
        "        import torch\n"
        "        print('this is no answer')\n"
        "        assert torch.get_num_threads() == 1\n"
        "        return history.table\n"
        "def make(artifact):\n"
        "    return Mine()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    run = "import dynamiccl.serve.cli as c; c.main()"
    command = (sys.executable, "-c", run, "brain", "--policy")
    table = own_table(small_artifact)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    del environment["OMP_NUM_THREADS"]
    with Leader(*command, "my_search:make", environment=environment) as leader:
        for history, answer in (
            (NOTHING, {}),
            (History((), table), {"table": table.to_bytes().hex()}),
        ):
            question = question_of(small_artifact.directory, CONFIG, history)
            assert leader.told(json.dumps(question)) == {"number": 1, **answer}
    with pytest.raises(UnknownName, match="choose from artifact, autoccl"):
        find_policy_maker("mine")
    # It ends with the shell that has started it, too.
    shell = ("/bin/sh", "-c", 'exec 3<&0; "$@" <&3 & echo $!; wait', "sh", *command, "autoccl")
    leader = Leader(*shell, environment=environment)
    assert leader.process.stdout is not None
    brain = Path("/proc", leader.process.stdout.readline().strip())
    assert "table" in leader.told(json.dumps(question))
    assert brain.exists()
    leader.process.kill()
    wait_until(lambda: not brain.exists(), "the brain is gone", 10)
    leader.process.communicate()
    with pytest.raises(UserError, match="PYTHONPATH"):
        find_policy_maker("my_search:other")


def own_table(artifact: Artifact) -> DecisionTable:
    return DecisionTable.read(artifact.directory / artifact.tables[0].path)


def test_artifact_asks_the_policy(small_artifact: Artifact, tmp_path: Path) -> None:
    brain = POLICIES["artifact"](small_artifact)
    history = History((task(SIZE, *map(float, range(1, 9))),), None)
    wanted = ScriptedBrain(small_artifact.directory / "brain.pt").decide(CONFIG, history)
    assert brain.decide(CONFIG, history) == wanted
    assert brain.decide(BrainConfig("elsewhere", 1, 8), history) is None
    # One of an older release is refused.
    older = replace(small_artifact, directory=tmp_path)
    with pytest.raises(CorruptFile, match="is not there, or of an older release; export the"):
        POLICIES["artifact"](older)
    shutil.copy(small_artifact.directory / "policy.pt", tmp_path / "brain.pt")  # it has no `decide`
    with pytest.raises(CorruptFile, match="older release; export the artifact again"):
        POLICIES["artifact"](older)


@pytest.fixture(scope="module")
def hinted(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return make_artifact(tmp_path_factory.mktemp("hinted"), HintPolicy())


def test_a_tuner_that_is_started_anew_goes_on_from_the_table_in_force(hinted: Artifact) -> None:
    ring, tree = (Config(a, Protocol.LL128) for a in (Algorithm.Ring, Algorithm.Tree))
    own = own_table(hinted)
    rows = [[tree] * NUM_BINS if c == Collective.AllReduce else [ring] * NUM_BINS for c in range(5)]
    found = DecisionTable.from_configs(rows, num_nodes=1, num_ranks=8, first_bin=FIRST_BIN)
    window = task(SIZE, 5.0, 5.1)
    for policy, at_key in (("search", tree), ("autoccl", None)):
        brain = POLICIES[policy](hinted)
        told = brain.decide(CONFIG, History((window,), found)) or found
        assert told.at(*KEY) == at_key  # AutoCCL compares with NCCL's own choice, always
        assert [told.at(KEY[0], BIN + 1), told.at(Collective.AllGather, BIN)] == [tree, ring]
    # What nobody measured is not played; where the table is the artifact's own, a job begins.
    task_of_reduce = task(SIZE, 5.0, collective=Collective.Reduce)
    without = POLICIES["search"](hinted).decide(CONFIG, History((task_of_reduce,), found))
    assert without is not None
    assert without.at(Collective.Reduce, BIN) is None
    for table in (None, own):
        begun = POLICIES["autoccl"](hinted).decide(CONFIG, History((), table)) or table
        assert begun is not None
        assert not begun.entries["act"].any()


@pytest.mark.parametrize("policy", ["autoccl", "search"])
@pytest.mark.parametrize(("first_bin", "num_bins"), [(FIRST_BIN - 4, NUM_BINS), (FIRST_BIN, 4)])
def test_tables_of_other_bins(first_bin: int, num_bins: int, policy: str, hinted: Artifact) -> None:
    rows = [[Config(Algorithm.Ring, Protocol.LL128)] * num_bins] * 5
    found = DecisionTable.from_configs(rows, num_nodes=1, num_ranks=8, first_bin=first_bin)
    last = task(SIZES[-1], 5.0, 5.1)
    told = POLICIES[policy](hinted).decide(CONFIG, History((last,), found))
    assert told is not None
    assert (told.first_bin, told.num_bins) == (FIRST_BIN, NUM_BINS)
    brain = POLICIES[policy](hinted)
    assert told == brain.decide(CONFIG, History((last,), None))


def test_a_tuner_waits_for_new_calls_and_for_its_table_to_be_in_force(hinted: Artifact) -> None:
    brain = POLICIES["autoccl"](hinted)
    window = task(SIZE, 5.0, 5.1, 5.2)
    probe = brain.decide(CONFIG, History((window,), None))
    assert probe is not None
    assert probe.at(*KEY) is not None
    for calls in (window, replace(task(SIZE, 5.2, 5.3, 5.4), num_timed=6)):  # NCCL's own choice
        assert brain.decide(CONFIG, History((calls,), None)) == probe
    assert brain.decide(CONFIG, History((task(1 << 40, 5.0, 5.0, 5.0),), probe)) is None


def test_an_artifacts_trigger_tells_a_tuner_of_slow_calls(
    hinted: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alarms: list[object] = []
    monkeypatch.setattr(PolicySearch, "alarm", lambda _, key: alarms.append(key))
    brain = POLICIES["search"](hinted)
    # What is next to nothing is no disturbance, and a fading one is still one.
    told = [None, 0.0, 0.04, 0.1, 0.4, 0.5, 0.1, None, 0.01, 0.1]
    found = []
    for index, level in enumerate(told):
        calls = tuple(replace(call, interference=level) for call in task(SIZE, 5, 5.1, 5.2).calls)
        window = KeyCalls(*KEY, calls, 3 + 3 * index)
        brain.decide(CONFIG, History((window,), None))
        found.append(len(alarms))
    assert found == [0, 0, 0, 0, 1, 1, 1, 1, 2, 2]
    assert set(alarms) == {KEY}

    save_script(TriggerModule(0.02), tmp_path / "trigger.pt")
    (tmp_path / "trigger.json").write_text("{}")
    policy, out = hinted.directory.parent / "policy", tmp_path / "artifact"
    brain = POLICIES["search"](export_artifact(policy, out, tmp_path / "trigger.pt"))
    random = np.random.default_rng(0)
    alarms.clear()
    found = []
    for round_ in range(60):
        slow = 1.5 if 30 <= round_ < 45 else 1.0
        times = 5.0 * slow * np.exp(0.02 * random.standard_normal(4))
        window = replace(task(SIZE, *times.tolist()), num_timed=4 + 4 * round_)
        brain.decide(CONFIG, History((window,), None))
        found.append(len(alarms))
    assert [found[at] for at in (29, 34, 44, -1)] == [0, 1, 1, 2]


def test_search_begins_with_the_table_and_waits_for_calls(small_artifact: Artifact) -> None:
    table = own_table(small_artifact)
    brain = POLICIES["search"](small_artifact)
    assert brain.decide(CONFIG, History((), None)) == table
    for _ in range(200):  # the same two calls say nothing new
        assert brain.decide(CONFIG, History((task(SIZE, 5.0, 5.0),), table)) is None
    assert brain.decide(CONFIG, History((task(1 << 40, 5.0, 5.0, 5.0),), table)) is None
