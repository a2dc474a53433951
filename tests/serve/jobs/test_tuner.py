"""The tuner in whole jobs: agreed once when a communicator is made, or NCCL's own choice."""

import re
import resource
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pytest

from dynamiccl.libraries import PROFILER_NAME, TUNER_NAME, VENDOR_NAME
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.serve.ab import tables_in
from dynamiccl.serve.install import install
from tests.serve.abi import compiled
from tests.serve.conftest import Runner
from tests.serve.jobs.arbiter import Arbiter
from tests.serve.jobs.conftest import Adaptive, Inits, Player, Tuner, Voting, player_of
from tests.serve.jobs.play import ALL, Played, at, every, on_rank, play
from tests.serve.jobs.setting import FIRST, Setting, prepared, shapes_of, write_artifact
from tests.serve.jobs.thinking import look, ranks_in, records_of

Start = Callable[..., Arbiter]
NO_PLUGIN: Final = {"NCCL_TUNER_PLUGIN": None, "NCCL_PROFILER_PLUGIN": None}
#: What is waited for in vain is a tenth of what a job waits for.
SHORT_LIMIT: Final = {"DYNAMICCL_TEST_LIMIT_MS": "1000"}
UNREAD: Final = "another release of NCCL than 2.27 to 2.30"
LATE: Final = "not all 4 ranks came in time"
#: Communicators: splits of the world by three colourings, and of a colouring again; another world.
SPLITS: Final = {"comms": 8, "release": "2.30"}
REARCH: Final = {"NCCL_ENQUEUE_REARCH_ENABLE": "0"}
#: Why all abstain ("": all have the table), settings of all, actions and settings of one, options.
JOBS: Final[dict[str, tuple[str, dict[str, str], Sequence[str], dict[str, Any]]]] = {
    "2.27": ("", {}, [], {"comms": 4, "threads": 2, "release": "2.27"}),
    "2.28": ("", {}, [], {"comms": 4, "threads": 2, "release": "2.28", "create_at_once": 1}),
    "2.29": ("", {}, [], {"comms": 4, "threads": 2, "release": "2.29"}),
    "split again": ("", {}, [], SPLITS | {"release": "2.27"}),
    "one group": ("", {}, [], SPLITS | {"create_at_once": 1}),
    "threads": ("", {}, [], SPLITS | {"threads": 4}),
    "destroyed, made anew": ("", {}, [], SPLITS | {"lifetime": 100}),
    "equal calls": ("", {}, [], SPLITS | {"comms": 5, "max_group": 1, "pattern": 1}),
    "forks": ("", {}, every(150, "fork", rank=ALL), SPLITS),
    "send and receive": ("", {}, every(100, "p2p", rank=ALL), SPLITS),
    "one captures": ("", {}, at(100, "capture=5,20", rank=1), {"comms": 2, "release": "2.27"}),
    "one simulates": ("", {}, at(100, "simulate=5", rank=1), SPLITS),
    # A cell would start a symmetric kernel on buffers that are not registered.
    "symmetric": ("", REARCH, every(50, "symmetric=4", rank=ALL), {}),
    # Before 2.27 none tells which communicator it is, whatever a job promises.
    "2.24": (UNREAD, {"DYNAMICCL_ONE_WORLD": "1"}, [], {"release": "2.24", "comms": 3}),
    "2.26": (UNREAD, {}, [], {"release": "2.26", "comms": 3}),
    "2.31": (UNREAD, {}, [], {"release": "2.31", "comms": 3}),
    "two nodes": ("DYNAMICCL_ARBITER is not set", {}, [], {"ranks": 8, "nodes": 2}),
    "one id": ("NCCL_COMM_ID is set", {"NCCL_COMM_ID": "127.0.0.1:1"}, [], {}),
    "kill file": ("a kill file is there", {"DYNAMICCL_KILL_FILE": "/dev/null"}, [], {}),
    "one without it": (LATE, SHORT_LIMIT, on_rank(2, NO_PLUGIN), {}),
    "one disabled": (LATE, SHORT_LIMIT, on_rank(2, {"DYNAMICCL_DISABLE": "1"}), {}),
}


def assert_table_from_call_0(played: Played) -> None:
    for comm in played.communicators:
        assert comm.acted == comm.calls > 0, played.log
    assert played.switches == 0 or any(comm.generations > 1 for comm in played.communicators)


@pytest.mark.parametrize("what", JOBS)
def test_all_ranks_have_the_table_from_call_0_or_all_abstain(what: str, tuner: Tuner) -> None:
    why, of_all, options, named = JOBS[what]
    played = tuner(*options, environment=of_all, **named)
    if not why:
        assert_table_from_call_0(played)
    else:
        assert played.acted == 0, played
        assert why in played.log


@pytest.mark.parametrize("library", [TUNER_NAME, VENDOR_NAME])
def test_a_job_that_dynamiccl_run_starts_has_its_table_from_call_0(
    library: str, tuner: Tuner, known: Path, tmp_path: Path
) -> None:
    """Also where the network plugin is a tuner, as AWS's is: that one is asked first."""
    is_net_a_tuner = library == VENDOR_NAME
    path = {"LD_LIBRARY_PATH": str(tmp_path)}
    if is_net_a_tuner:
        (tmp_path / "libnccl-net.so").symlink_to(tuner.directory / "libwilful_v3.so")
    home = Path(install(known, tmp_path / "home", tuner.directory / TUNER_NAME)["directory"])
    run = Runner(home)
    run.env["DYNAMICCL_TEST_ROOT"] = str(tuner.setting.machine)
    shown = run.shown(said="asked before ours" if is_net_a_tuner else "", **path)
    plugin = home / "lib" / library
    assert Path(shown["NCCL_TUNER_PLUGIN"]) == plugin
    ours = {name: value for name, value in shown.items() if name.startswith("DYNAMICCL_")}
    environment = tuner.setting.environment() | ours | path
    program = tuner.directory / "play_rank"
    job = partial(play, program, plugin, environment=environment, rate=4000, calls=800)
    played = job(ranks=8)
    assert played.acted > 0
    assert played.switches == 0
    assert played.log.count("the artifact's table, from call 0") == 8
    asked = "(libnccl-net.so): is asked first on every call (v3)"
    assert played.log.count(asked) == (8 if is_net_a_tuner else 0)
    # An A/B reads in how many communicators tables acted, and why not in others.
    for ranks, acted in ((8, (1, 3)), (3, (0, 2))):
        *counts, reason = tables_in(job(ranks=ranks, comms=2).log.splitlines())
        assert (tuple(counts), "the artifact has no table for" in str(reason)) == (acted, True)


@pytest.mark.parametrize("word", ["0", "1"])
def test_ranks_of_two_nodes_agree_by_the_arbiter(word: str, tuner: Tuner, voting: Voting) -> None:
    """With 1 a communicator of one node agrees by a word."""
    environment = voting(True) | {"DYNAMICCL_WORD": word}
    played = tuner(environment=environment, ranks=8, nodes=2, comms=4)
    assert_table_from_call_0(played)


#: Words of a line of the log -> what one rank's environment is.
DIFFERENCES: Final[dict[str, Callable[[Setting, Path], Mapping[str, str | None]]]] = {
    "artifact": lambda s, _: prepared(s.other_artifact),
    "table": lambda s, _: {"DYNAMICCL_TABLES": str(s.other_artifact / "tables")},
    "machine": lambda *_: {"DYNAMICCL_MACHINE": "gpu=NVIDIA Strange GPU*8;mig=0;nic=none*0"},
    "has no table": lambda s, _: {"DYNAMICCL_TABLES": str(s.root)},
    "no artifact is installed": lambda *_: {"DYNAMICCL_PROBLEM": "no artifact is installed"},
    "through dynamiccl-run": lambda *_: {"DYNAMICCL_HOST": "another"},
    # Where a table's cell would beat symmetric kernels that a tuner is not shown.
    "NCCL_ENQUEUE_REARCH_ENABLE is set": lambda *_: {"NCCL_ENQUEUE_REARCH_ENABLE": "1"},
    # Else this one would run what the vendor says, and the others what NCCL says.
    "vendor's tuner": lambda _, build: {
        "NCCL_TUNER_PLUGIN": str(build / VENDOR_NAME),
        "DYNAMICCL_NEXT_TUNER": str(build / "libwilful_v6.so"),
    },
}


@pytest.mark.parametrize("difference", DIFFERENCES)
@pytest.mark.parametrize("by_arbiter", [False, True], ids=["word", "arbiter"])
def test_who_differs_is_named(
    difference: str, by_arbiter: bool, tuner: Tuner, voting: Voting
) -> None:
    differs = on_rank(2, DIFFERENCES[difference](tuner.setting, tuner.directory))
    played = tuner(*differs, environment=voting(by_arbiter), comms=2)
    for comm in played.communicators:
        assert comm.acted == (0 if 2 in comm.ranks else comm.calls), played.log
    assert re.search(difference, played.log), played.log
    assert re.search(r"rank \d(:| differs| cannot use a table)", played.log), played.log
    assert played.created_longest_ms < 5000


def test_a_rank_without_the_key_can_make_all_abstain(tuner: Tuner, arbiter: Start) -> None:
    environment = tuner.setting.by_arbiter(arbiter(limit_ms=1000).address) | SHORT_LIMIT
    played = tuner(*on_rank(2, {"DYNAMICCL_KEY": "0" * 32}), environment=environment)
    assert played.acted == 0, played


@pytest.mark.parametrize(("release", "lifetime"), [("2.27", 0), ("2.30", 100)])
def test_what_comes_of_disjoint_shrinks_abstains(release: str, lifetime: int, tuner: Tuner) -> None:
    """Both halves shrink the world at once, under one id, and split that, under one id again.

    With a lifetime each does it again, as one does whose shrink failed, and a process that has been
    in a shrink has no new table of the world's next ones either.
    """
    played = tuner(release=release, comms=4, shrinks=1, lifetime=lifetime)
    for comm in played.communicators:
        assert comm.first_acted == (0 if comm.slot == 0 else None), played.log
        assert comm.generations_acted == (comm.slot == 0), played.log


def test_a_communicator_grows(inits: Inits) -> None:
    """Ranks that were in none before, in processes whose tuner has just been loaded, are in it."""
    artifact = write_artifact(inits.setting.root / "grown", FIRST, [(1, 4), (1, 6)])
    found = inits(prepared(artifact), ranks=6, processes=3, rounds=2, grow=2)
    assert (found["tables"], found["abstained"], found["failed"]) == (4 + 6, 0, 0)


def test_other_communicators_do_not_wait_for_one_whose_rank_is_late(inits: Inits) -> None:
    """As after an abort: NCCL's thread stays in `init`, and the job makes another communicator."""
    found = inits(ranks=4, processes=2, rounds=3, at_once=1, late=2000)
    assert (found["tables"], found["failed"], found["before_the_late"]) == (12, 0, 2)


@pytest.mark.parametrize("static_kib", [224, 240])
def test_much_thread_local_memory_is_borne(static_kib: int, inits: Inits, tmp_path: Path) -> None:
    """glibc takes it from each thread's stack."""
    source = (
        '__thread char block[KIB * 1024] __attribute__((tls_model("initial-exec")));\n'
        "char *get_block(void) { return block; }\n"
    )
    preloaded = compiled(tmp_path / "block.so", source, f"-DKIB={static_kib}")
    found = inits({"LD_PRELOAD": str(preloaded)}, ranks=4, processes=2)
    assert (found["tables"], found["abstained"], found["failed"]) == (4, 0, 0), found["said"]


def test_what_is_left_of_a_jobs_former_round_has_communicators_of_its_own(tuner: Tuner) -> None:
    """Under one job id, but with ids of communicators that NCCL drew anew."""
    rounds = [{}, prepared(tuner.setting.other_artifact)]
    with ThreadPoolExecutor() as pool:
        for played in pool.map(lambda own: tuner(environment=own, comms=4), rounds):
            assert_table_from_call_0(played)


@pytest.mark.parametrize("by_arbiter", [False, True], ids=["word", "arbiter"])
def test_two_thousand_ranks_with_few_descriptors(
    by_arbiter: bool, inits: Inits, tmp_path: Path, voting: Voting
) -> None:
    artifact = write_artifact(tmp_path / "large", FIRST, [(1, 2000)])
    environment = voting(by_arbiter) | prepared(artifact)
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    try:
        found = inits(environment, ranks=2000, processes=4)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
    assert (found["tables"], found["abstained"], found["failed"]) == (2000, 0, 0)


# Both modes, and the recorder alone: what NCCL and jobs do that must split nothing.

Either = Tuner | Adaptive


@pytest.fixture(params=["table", "adaptive"])
def either(request: pytest.FixtureRequest, tuner: Tuner, adaptive: Adaptive) -> Either:
    """A job of mode table or of mode adaptive."""
    return tuner if request.param == "table" else adaptive


@pytest.mark.parametrize(("rank", "go_on"), [(0, 0), (2, 1)], ids=["all-abort", "survivors-go-on"])
def test_a_creation_that_is_aborted_splits_nothing(go_on: int, rank: int, either: Either) -> None:
    """The others may have the table by then: they wait in a collective, for the job's watchdog."""
    played = either(
        release="2.28",
        comms=2,
        abort_creation=rank,
        survivors_go_on=go_on,
        watchdog=0.2,
        calls=4000,
    )
    world = played.communicators[0]
    assert (world.calls == 4000) == bool(go_on)
    other = [comm for comm in played.communicators if comm.slot == 1]
    assert any(comm.acted for comm in other), played.log


@pytest.mark.parametrize("release", ["2.28", "2.30"])
def test_allgatherv_is_given_no_channels_that_are_not_there(release: str, either: Either) -> None:
    """It asks about an AllGather and takes the number as the index of a channel."""
    many = Config(Algorithm.Ring, Protocol.LL128, 64)
    artifact = write_artifact(either.setting.root / "many", many, shapes_of(4))
    either = replace(either, setting=replace(either.setting, artifact=artifact))
    played = either(*every(20, "bcasts=3", rank=ALL), release=release)
    assert played.acted > 0


Recording = Callable[..., tuple[Played, npt.NDArray[np.void]]]


@pytest.fixture
def record(job_build_dir: Path, setting: Setting) -> Recording:
    """A job under the recorder alone (mode observe), and what it kept of rank 0."""

    def run(
        *options: str, percent: int = 100, **named: object
    ) -> tuple[Played, npt.NDArray[np.void]]:
        calls_dir = setting.root / "calls"
        calls_dir.mkdir(mode=0o700)
        own = {"DYNAMICCL_CALLS_DIR": str(calls_dir), "DYNAMICCL_SAMPLE_PERCENT": str(percent)}
        played = player_of(job_build_dir, PROFILER_NAME)(
            *options, environment=setting.environment() | own, **named
        )
        assert played.acted == 0
        assert len(list(calls_dir.iterdir())) == len(played.ranks)
        return played, records_of(calls_dir, 0)

    return run


def test_the_recorder_alone_agrees_on_nothing(record: Recording, tmp_path: Path) -> None:
    """Children write nothing into their parents' files."""
    seen, forks = tmp_path / "look", every(300, "fork", rank=ALL)
    record(*at(400, look(seen), rank=ALL), *forks, ranks=4, rate=1000, calls=700)
    for rank in ranks_in(seen):
        assert re.findall("^dynamiccl.*", rank, re.MULTILINE) == ["dynamiccl-calls"]
    assert len(ranks_in(seen)) == 4


@pytest.mark.parametrize(("release", "drop"), [("2.28", 20), ("2.29", 20), ("2.30", 0)])
def test_all_calls_are_heard_of_and_those_that_lose_no_event_are_timed(
    drop: int, release: str, record: Recording
) -> None:
    played, records = record(ranks=2, release=release, max_group=1, rate=1000, kernel_drop=drop)
    assert len(records) == played.calls
    # From 2.29 on a Broadcast is heard of by its call alone.
    is_told = (records["collective"] != Collective.Broadcast) | (release == "2.28")
    is_timed = records["start_ns"] > 0
    assert not is_timed[~is_told].any()
    assert is_timed[is_told].mean() > 0.95 if drop == 0 else is_timed.mean() < 0.7


@pytest.mark.parametrize(("percent", "silent"), [(0, 95), (100, 76)])
def test_a_replay_is_heard_of_only_with_host_nodes(
    percent: int, silent: int, record: Recording
) -> None:
    """A graph has them that was captured while times were taken: the first of five."""
    captures = at(100, "capture=5,20", rank=ALL)
    played, records = record(*captures, percent=percent, ranks=2, max_group=1, rate=1000, calls=500)
    assert played.calls - len(records) == silent


ACTS = {"WILFUL_ACT_FROM": "100"}


def test_what_differs_and_what_nccl_does_not_survive_is_found(play_wilful: Player) -> None:
    played = play_wilful(environment=ACTS, ranks=4, comms=4, threads=2)
    assert [len(comm.ranks) for comm in played.communicators] == [4, 2, 2, 2, 2, 2, 2]
    assert all(comm.first_acted == 100 for comm in played.communicators)
    assert played.switches == 7  # from NCCL's own choice, once for each
    late = play_wilful(*on_rank(2, {"WILFUL_ACT_FROM": "101"}), environment=ACTS, ranks=4)
    assert (late.disagreements, late.acted_unevenly) == (1, 1)
    answers = late.first_disagreement
    assert [(answer["call"], answer["acted"]) for answer in answers] == [
        *((100, 1), (100, 1), (100, 0), (100, 1))
    ]
    assert (answers[2]["protocol"], answers[2]["num_channels"]) != (Protocol.LL, 3)
    for name, value, complaint in (
        ("CELL", "20", "wrote into the unavailable cell 20"),
        ("CHANNELS", "65", "asked for 65 channels"),
        ("LOG_FROM_THREAD", "1", "logged from a thread of its own"),
    ):
        wilful = ACTS | {f"WILFUL_{name}": value}
        played = play_wilful(environment=wilful, ranks=2, release="2.30", calls=300)
        assert any(complaint in text for text in played.ranks[0].violations)
