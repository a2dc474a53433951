"""Arguments and environment of the nccl-tests process of a launch (pure)."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from dynamiccl.collect.benchmark.blocks import REPORT_NAME, SCHEDULE_NAME
from dynamiccl.collect.benchmark.grid import Grid
from dynamiccl.collect.benchmark.programs import Program
from dynamiccl.collect.runner import Launch, LaunchMode
from dynamiccl.collect.sweep import SweepFile
from dynamiccl.nccl import Config

#: Variables that override the requested config (`src/graph/tuning.cc` reads them first).
CONFIG_VARIABLES: Final = ("NCCL_ALGO", "NCCL_PROTO")
#: Variables that only our launches may set.
PLUGIN_VARIABLES: Final = (
    "DYNAMICCL_MODE",
    "DYNAMICCL_SCHEDULE",
    "DYNAMICCL_SCHEDULE_HASH",
    "DYNAMICCL_SWEEP_REPORT",
)
#: How nccl-tests makes several communicators (v2.14 to v2.19.6, `src/common.cu`, run).
_SPLIT: Final = "NCCL_TESTS_SPLIT"
_SPLIT_MASK: Final = "NCCL_TESTS_SPLIT_MASK"


@dataclass(frozen=True, slots=True)
class Calls:
    """Iterations of the benchmark: `-n`, `-w` and `-c`."""

    iterations: int
    warmup: int
    checks: int

    @property
    def per_half(self) -> int:
        """Calls in one half (in-place or out-of-place) of a block: sync, timed and checked ones."""
        return 1 + self.iterations + self.checks


def small_bytes(file: SweepFile) -> int:
    """Sizes up to this many bytes get more iterations; 0 = all get the same number."""
    return file.small_max if file.small_iterations > file.iterations else 0


def calls_of(launch: Launch, program: Program, file: SweepFile) -> Calls:
    """The iteration counts of this launch.

    What a warm-up calls differs between releases before 2.16.9, which their help text does not
    tell; where calls are counted there is none then, and the synchronising calls connect.
    """
    read_back = launch.mode is LaunchMode.READ_BACK
    is_small = all(pick.trial.size_bytes <= small_bytes(file) for pick in launch.picks)
    iterations = file.small_iterations if is_small else file.iterations
    calls = Calls(1, 1, 0) if read_back else Calls(iterations, file.warmup_iterations, 1)
    counted = read_back or launch.is_scheduled
    return calls if program.warms_up_each_size or not counted else replace(calls, warmup=0)


@dataclass(frozen=True, slots=True)
class Places:
    """Paths of the files of one launch, as the ranks see them."""

    json: str
    schedule: str
    report: str
    log: str
    topology: str
    graph: str

    @classmethod
    def under(cls, folder: Path) -> "Places":
        """The paths of a launch that runs in `folder`."""
        names = (
            "rows.json",
            SCHEDULE_NAME,
            REPORT_NAME,
            "nccl.%h.%p.log",
            "topology.xml",
            "graph.xml",
        )
        return cls(*(str(folder / name) for name in names))


@dataclass(frozen=True, slots=True)
class Environment:
    """Variables to set on every rank, and variables to remove."""

    set: Mapping[str, str]
    unset: tuple[str, ...] = ()


def arguments(
    program: Program, launch: Launch, grid: Grid, file: SweepFile, *, gpus: int, json: str
) -> tuple[str, ...]:
    """The benchmark's argument vector: `gpus` of each process, rows to `json` where it can."""
    calls = calls_of(launch, program, file)
    timed = launch.mode is not LaunchMode.READ_BACK
    argv = [program.path, *grid.chain.arguments, "-g", str(gpus)]
    argv += ["-n", str(calls.iterations), "-w", str(calls.warmup), "-c", str(calls.checks)]
    argv += ["-d", launch.setting.datatype]
    argv += file.runner.arguments
    if len(grid.cycles) > 1:
        argv += ["-N", str(len(grid.cycles))]
    if timed and program.has_iteration_times and file.runner.per_iteration:
        argv += ["-I", "1"]
    if timed and program.has_json:
        argv += ["-J", json]
    return tuple(argv)


def environment(launch: Launch, places: Places, plugin: str, schedule_hash: str) -> Environment:
    """The variables that a launch sets and unsets, by its mode.

    A reference launch is the user's own environment and nothing else. `schedule_hash` is empty for
    a read-back launch that forces its one config by environment.
    """
    split = {_SPLIT: launch.setting.split} if launch.setting.split else {}
    # NCCL_TESTS_SPLIT_MASK is read first, and would take precedence.
    if launch.mode is LaunchMode.REFERENCE:
        return Environment(split, (*PLUGIN_VARIABLES, *([_SPLIT_MASK] if split else [])))
    # Without NCCL_DEBUG a failure prints no details.
    found = {"NCCL_DEBUG": "WARN", **dict(launch.setting.profile.environment), **split}
    if schedule_hash:
        found |= {
            "NCCL_TUNER_PLUGIN": plugin,
            "DYNAMICCL_MODE": "sweep",
            "DYNAMICCL_SCHEDULE": places.schedule,
            "DYNAMICCL_SCHEDULE_HASH": schedule_hash,
            "DYNAMICCL_SWEEP_REPORT": places.report,
        }
        unset: tuple[str, ...] = CONFIG_VARIABLES
    else:
        forced = forced_config(launch.picks[0].trial.config)
        found |= forced
        unset = PLUGIN_VARIABLES
        if forced:
            unset += tuple(name for name in CONFIG_VARIABLES if name not in forced)
    if launch.mode is LaunchMode.READ_BACK:
        found |= {
            "NCCL_DEBUG": "INFO",
            "NCCL_DEBUG_SUBSYS": "INIT,ENV,TUNING",
            "NCCL_DEBUG_FILE": places.log,
        }
        # Each communicator would write its dump to the same file.
        if not split:
            found |= {
                "NCCL_TOPO_DUMP_FILE": places.topology,
                "NCCL_GRAPH_DUMP_FILE": places.graph,
            }
    return Environment(found, (*unset, _SPLIT_MASK) if split else unset)


def forced_config(config: Config) -> dict[str, str]:
    """The variables that force a config on a process; none for NCCL's default.

    NCCL user guide (`env.rst`, v2.30.7): NCCL_ALGO, NCCL_PROTO; NCCL_MIN_CTAS = NCCL_MAX_CTAS.
    """
    forced: dict[str, str] = {}
    if config.algorithm is not None:
        forced["NCCL_ALGO"] = config.algorithm.wire
    if config.protocol is not None:
        forced["NCCL_PROTO"] = config.protocol.wire
    if config.num_channels is not None:
        forced["NCCL_MIN_CTAS"] = forced["NCCL_MAX_CTAS"] = str(config.num_channels)
    return forced
