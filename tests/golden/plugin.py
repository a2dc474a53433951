"""Answers of getCollInfo: 10,000 random questions to each library and tuner ABI, a table in force.

Each library is driven by NCCL's public ABI alone, in a process of its own, since a vendor's tuner
is looked for once a process. Costs are eighths of a us and everything is drawn by `random`, so
that the questions are the same bits on every machine.

    python -m tests.golden.plugin LIBRARY BUILD_DIR WORK_DIR      one line of JSON
"""

import ctypes
import functools
import hashlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any, Final

import numpy as np

from dynamiccl.libraries import ADAPTIVE_NAME, PROFILER_NAME, SWEEP_NAME, TUNER_NAME, VENDOR_NAME
from dynamiccl.nccl import (
    ABSTAIN,
    COST_IGNORE,
    MAX_CHANNELS,
    NUM_PROTOCOLS,
    VALID_PROTOCOLS,
    Algorithm,
    Collective,
    Config,
    Protocol,
)
from dynamiccl.schedule import PlayReport, Schedule
from dynamiccl.serve.table import DecisionTable
from tests.collect.calls.rank import Profiler as ProfilerStruct
from tests.golden.command import clean_environment, dynamiccl
from tests.golden.frames import equal_frames, tables
from tests.golden.golden import Golden
from tests.plugin_build import built
from tests.published import ROOT
from tests.serve.abi import Communicator, TunerPlugin, loopback_environment, write_bare_artifact
from tests.serve.answers import Answer, CostTable
from tests.serve.benchmark_calls import benchmark_calls, stage
from tests.serve.jobs.arbiter import Arbiter
from tests.serve.jobs.setting import KEY

SEED: Final = 43
QUESTIONS: Final = 10_000
SHOWN: Final = 100
SYSTEM: Final = "test-system"
TUNED: Final = [collective for collective in Collective if collective.tunable]
#: (ranks, nodes): some algorithms' channels are set on one node only.
SHAPES: Final = ((8, 1), (16, 2))
#: Of a recorded call: when it was, and on which machine.
_HERE: Final = (
    *("timestamp", "node_fingerprint", "gpu", "mig", "nic_kind", "nics_per_node"),
    *("nic_gbits_per_s", "cpu_vendor", "exclusive_node", "compute_capability"),
    *("nvlink_generation", "nvlinks_per_gpu", "nvswitch"),
)
_OWN_CHUNK_BYTES: Final = 1 << 21


@dataclass(frozen=True, slots=True)
class Question:
    """What NCCL passes to getCollInfo."""

    collective: Collective
    size_bytes: int
    num_pipe_ops: int
    reg_buff: int
    costs: CostTable


def random_config(random: Random, collective: Collective) -> Config | None:
    """Any Config that NCCL has for `collective`, AUTO knobs included; None is to abstain."""
    algorithm = random.choice([None, *VALID_PROTOCOLS[collective]])
    protocols = Protocol if algorithm is None else VALID_PROTOCOLS[collective][algorithm]
    protocol = random.choice([None, *sorted(protocols)])
    channels = random.randrange(MAX_CHANNELS + 1) or None
    config = Config(algorithm, protocol, channels)
    return None if random.randrange(4) == 0 or config == ABSTAIN else config


def random_table(random: Random, num_ranks: int, num_nodes: int) -> DecisionTable:
    return DecisionTable.from_configs(
        [[random_config(random, collective) for _ in range(120)] for collective in TUNED],
        num_nodes=num_nodes,
        num_ranks=num_ranks,
        first_bin=20,
    )


def random_costs(random: Random) -> CostTable:
    """With what a tuner must expect: cells that are not there, ties, a relegated ring, nonsense."""
    rows = random.choice([6, 7])
    step = random.choice([1, 1, 400])  # of an eighth of a us; coarse ones tie
    drawn = [step * random.randrange(1, 4000 // step) / 8 for _ in range(rows * NUM_PROTOCOLS)]
    costs = np.array(drawn, dtype=np.float32).reshape(rows, NUM_PROTOCOLS)
    if random.randrange(4) == 0:
        costs[1] *= 1024  # as NCCL does for fp8 on more than 8 ranks
    missing, odd = random.choice([0.0, 0.3, 0.9]), random.choice([0.0, 0.0, 0.1])
    for cell in range(costs.size):
        if random.random() < missing:
            costs.flat[cell] = COST_IGNORE
        elif random.random() < odd:
            costs.flat[cell] = random.choice([np.nan, np.inf, -np.inf, -7.0, 0.0, -0.0])
    return costs


def random_question(random: Random) -> Question:
    collective, size_bytes = random.choice(TUNED), int(2 ** (3 + 35 * random.random()))
    pipe_ops = random.choice([1, 1, 1, 2, 5])  # 0 asks about symmetric kernels
    reg_buff = random.randrange(2)
    random.randrange(2)  # was drawn when the answers that are kept were made
    return Question(collective, size_bytes, pipe_ops, reg_buff, random_costs(random))


def questions(count: int) -> list[Question]:
    random = Random(SEED)
    return [random_question(random) for _ in range(count)]


def told(question: Question, answer: Answer) -> str:
    """What was written: `cell=value` of the cost table, and channels. Or `-`."""
    if not answer.acted:
        return "-"
    after = answer.cost_table_after
    was, now = (table.ravel().view(np.int32) for table in (question.costs, after))
    written = [f"{cell}={after.flat[cell]:g}" for cell in np.flatnonzero(was != now)]
    return " ".join([*written, f"{answer.num_channels}ch"])


def asked(communicator: Communicator, version: int, question: Question) -> str:
    """One getCollInfo, and getChunkSize where the version has one."""
    answer = communicator.ask(
        question.collective,
        question.size_bytes,
        question.costs,
        num_pipe_ops=question.num_pipe_ops,
        reg_buff=question.reg_buff,
    )
    text = told(question, answer)
    if version == 6 and answer.algorithm is not None and answer.protocol is not None:
        chunk_bytes = chunk(communicator, question, answer)
        text += f" chunk {chunk_bytes}" if chunk_bytes != _OWN_CHUNK_BYTES else ""
    return text


def chunk(communicator: Communicator, question: Question, answer: Answer) -> int:
    """What getChunkSize leaves of NCCL's own chunk."""
    chunk_bytes = ctypes.c_size_t(_OWN_CHUNK_BYTES)
    ask = communicator._struct.get_chunk_size
    if not ask:
        return _OWN_CHUNK_BYTES
    part = (int(question.collective), question.size_bytes, answer.algorithm, answer.protocol, 1)
    assert ask(communicator._context, *part, ctypes.byref(chunk_bytes)) == 0
    return chunk_bytes.value


#: Of one ABI version: what was answered, and what else there is to keep.
Answers = tuple[int, list[str], dict[str, Any]]


def summaries(found: Iterable[Answers]) -> dict[str, Any]:
    """By version how many were acted on, and a digest of all answers; the first ones whole.

    These are there once for versions that answer alike.
    """
    made: dict[str, Any] = {}
    seen: set[str] = set()
    for version, answers, more in found:
        digest = hashlib.sha256("\n".join(answers).encode()).hexdigest()
        acted = sum(not answer.startswith("-") for answer in answers)
        made[f"v{version}"] = {"asked": len(answers), "acted": acted, "sha256": digest, **more}
        if acted and digest not in seen:
            made[f"v{version}"]["first"] = answers[:SHOWN]
        seen.add(digest)
    return made


def deploy(directory: Path, shape: tuple[int, int]) -> dict[str, str | None]:
    """An artifact with a random table for `shape`; the environment of ranks that use it."""
    artifact = directory / "x".join(map(str, shape))
    if not artifact.is_dir():
        write_bare_artifact(artifact, SYSTEM, random_table(Random(SEED), *shape))
    return loopback_environment(artifact, SYSTEM)


def of_table(plugin: TunerPlugin, directory: Path) -> Iterator[Answers]:
    """The tuner of jobs: half of the questions to a communicator of each shape."""
    everything = questions(QUESTIONS)
    for version in plugin.versions:
        answers = []
        for index, shape in enumerate(SHAPES):
            with plugin.communicator(
                *shape,
                version=version,
                environment=deploy(directory, shape),
                all_ranks=True,
            ) as communicator:
                for question in everything[index :: len(SHAPES)]:
                    answers.append(asked(communicator, version, question))
        yield version, answers, {}


def of_vendor(plugin: TunerPlugin, directory: Path) -> Iterator[Answers]:
    """The same, behind a vendor's tuner (serve/plugin/tests/wilful_plugin.cpp) that acts or not."""
    os.environ["DYNAMICCL_NEXT_TUNER"] = str(plugin.path.with_name("libwilful_v6.so"))
    random, (num_ranks, num_nodes) = Random(SEED), SHAPES[0]
    everything = questions(QUESTIONS)
    # Never a cell of the seventh row, which made-up costs may lack.
    wishes = [(random.randrange(-1, 18), random.choice([-1, 4096])) for _ in everything]
    for version in plugin.versions:
        answers = []
        with plugin.communicator(
            num_ranks,
            num_nodes,
            version=version,
            environment=deploy(directory, SHAPES[0]),
            all_ranks=True,
        ) as communicator:
            for question, (cell, chunk_bytes) in zip(everything, wishes, strict=True):
                os.environ["WILFUL_CELL"] = str(cell)
                os.environ["WILFUL_CHUNK"] = str(chunk_bytes)
                answers.append(asked(communicator, version, question))
        yield version, answers, {}


def of_sweep(plugin: TunerPlugin, directory: Path) -> Iterator[Answers]:
    """The player of sweeps: a schedule for each collective; its report's states come last."""
    for version in plugin.versions:
        answers: list[str] = []
        states: Counter[str] = Counter()
        for collective in TUNED:
            random = Random(f"{SEED} {collective.wire}")
            schedule = random_schedule(random, collective, chunks=version >= 6)
            environment = stage(directory / f"v{version}-{collective.wire}", schedule)
            with plugin.communicator(8, 1, version=version, environment=environment) as player:
                for size_bytes in [call.size_bytes for call in benchmark_calls(schedule)]:
                    costs = random_costs(random)
                    costs[costs == 0] = 1  # so that setting a cell to 0 shows
                    pipe_ops, reg_buff = random.choice([1, 1, 2]), random.randrange(2)
                    question = Question(collective, size_bytes, pipe_ops, reg_buff, costs)
                    answers.append(asked(player, version, question))
            report = Path(environment["DYNAMICCL_SWEEP_REPORT"] or "").read_bytes()
            states.update(state.name for state in PlayReport.from_bytes(report).states)
        assert len(answers) == QUESTIONS
        yield version, answers, {"blocks": dict(sorted(states.items()))}


def random_schedule(random: Random, collective: Collective, *, chunks: bool) -> Schedule:
    """One that takes 2,000 calls of eight ranks: 20 of warm-up, 33 cycles of five sizes."""

    def config() -> Config:
        drawn = random_config(random, collective) or ABSTAIN
        if drawn == ABSTAIN or drawn.algorithm is Algorithm.NVLSTree:
            return ABSTAIN
        chunk_bytes = random.choice([None, 1 << 16, 100_000])
        cell = drawn.algorithm, drawn.protocol, drawn.num_channels
        return Config(*cell, chunk_bytes if chunks else None)

    sizes = tuple(1 << power for power in range(10, 15))
    return Schedule(
        collective=collective,
        num_ranks=8,
        num_nodes=1,
        warmup=tuple((size, 4) for size in sizes),
        halves=2,
        calls_per_half=6,
        sizes=sizes,
        cycles=tuple(tuple(config() for _ in sizes) for _ in range(33)),
    )


def of_adaptive(plugin: TunerPlugin, directory: Path) -> Iterator[Answers]:
    """Mode adaptive: two ranks, which vote by an arbiter of their own."""
    shape, everything = (2, 1), questions(QUESTIONS)
    environment = {name: value or "" for name, value in deploy(directory, shape).items()}
    program = str(plugin.path.with_name("dynamiccl-arbiter"))
    with Arbiter([program], environment["DYNAMICCL_JOB"], 10_000) as arbiter:
        environment |= {"DYNAMICCL_ARBITER": arbiter.address, "DYNAMICCL_KEY": KEY}
        os.environ.update(environment, DYNAMICCL_WORD="0")
        for version in plugin.versions:
            if version < 5:  # it needs to be told of launches, and abstains
                with plugin.communicator(*shape, version=version, all_ranks=True) as communicator:
                    yield version, [asked(communicator, version, each) for each in everything], {}
                continue
            ranks = range(shape[0])
            with ThreadPoolExecutor(len(ranks)) as pool:
                running = [
                    pool.submit(of_rank, plugin, version, rank, shape, everything) for rank in ranks
                ]
            first, second = (each.result() for each in running)
            assert first == second, "the ranks differ"
            yield version, first, {}


def of_rank(
    plugin: TunerPlugin,
    version: int,
    rank: int,
    shape: tuple[int, int],
    everything: list[Question],
) -> list[str]:
    """As NCCL 2.28 (v5) and 2.30 (v6) run it: the profiler knows the communicator before."""
    num_ranks, num_nodes = shape
    profiler: Any = ProfilerStruct.in_dll(ctypes.CDLL(str(plugin.path)), f"ncclProfiler_v{version}")
    tuner: Any = plugin._structs[version]
    told, context, mask = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    comm_id = 100 + version
    profiler.init(told, comm_id, mask, b"golden", num_nodes, num_ranks, rank, None)
    no_logger = tuner.init.argtypes[4]()
    tuner.init(ctypes.byref(context), comm_id, num_ranks, num_nodes, no_logger, None, None)
    communicator = Communicator(tuner, context)
    answers = [asked(communicator, version, each) for each in everything]
    tuner.finalize(context)
    profiler.finalize(told)
    return answers


#: Library, and how it is asked.
ASKED: Final[dict[str, tuple[str, Callable[..., Iterator[Answers]]]]] = {
    "tuner": (TUNER_NAME, of_table),
    "vendor": (VENDOR_NAME, of_vendor),
    "sweep": (SWEEP_NAME, of_sweep),
    "adaptive": (ADAPTIVE_NAME, of_adaptive),
}


def make_answers(kind: str, directory: Path) -> Any:
    """All answers of a library, in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.golden.plugin", kind, str(built()), str(directory)],
        env=clean_environment(),
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def make_calls(directory: Path) -> Any:
    """What the recorder keeps of three ranks' calls, as `dynamiccl-collect import` reads it."""
    for rank in range(3):
        subprocess.run(
            [
                sys.executable,
                "-m",
                "tests.collect.calls.rank",
                built() / PROFILER_NAME,
                f"{rank}",
                "3",
            ],
            env=clean_environment(
                DYNAMICCL_CALLS_DIR=str(directory / "calls"),
                DYNAMICCL_SAMPLE_PERCENT="100",
                DYNAMICCL_JOB_ID="job 9",
                RANK=f"{rank}",
            ),
            cwd=ROOT,
            check=True,
        )
    known = ("--system", "box", "--sweep", "jobs", "--json")
    done = dynamiccl("collect", "import", "calls", "--out", "out", *known, directory=directory)
    assert done.code == 0, done.err
    return tables(directory / "out", order=("collective", "sequence"), without=_HERE)


GOLDENS: Final = (
    *(Golden(f"plugin-{kind}", functools.partial(make_answers, kind)) for kind in ASKED),
    Golden("plugin-calls", make_calls, equal_frames),
)


def _main() -> None:
    kind, build, directory = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
    library, ask = ASKED[kind]
    found = summaries(ask(TunerPlugin(build / library), directory))
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    _main()
