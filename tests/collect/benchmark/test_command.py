import pytest

from dynamiccl.collect.benchmark.command import (
    CONFIG_VARIABLES,
    PLUGIN_VARIABLES,
    Places,
    arguments,
    calls_of,
    environment,
    forced_config,
    small_bytes,
)
from dynamiccl.collect.benchmark.grid import deal
from dynamiccl.collect.benchmark.layout import lay_out
from dynamiccl.collect.benchmark.programs import Program
from dynamiccl.collect.runner import Launch, LaunchMode
from dynamiccl.nccl import Algorithm, Config, Protocol
from tests.collect.benchmark.sweeps import launch_of, round_of, sweep

OLD = Program("/opt/all_reduce_perf", frozenset("tgbeifnmwNpcodrzyTGCaRh"))
NEW = Program("/opt/all_reduce_perf", OLD.options | frozenset("JSIKxDVMu"))
MADE = sweep(profiles='[{ name = "net", transport = "NET" }]')
TRIALS = [trial for trial in MADE.trials if trial.infeasible is None]
PLACES = Places("/w/rows.json", "/w/schedule", "/w/report", "/w/log", "/w/topo", "/w/graph")


def line(program: Program, launch: Launch, *, gpus: int = 8) -> str:
    grid = deal(launch, max_blocks=1000)
    return " ".join(arguments(program, launch, grid, MADE.file, gpus=gpus, json="/w/rows.json"))


def test_command_line_of_a_sweep() -> None:
    assert line(NEW, launch_of(TRIALS)) == (
        "/opt/all_reduce_perf -b 1048576 -e 4194304 -f 2 -g 8 -n 5 -w 2 -c 1 -d float -N 9 "
        "-J /w/rows.json"
    )


def test_times_of_single_iterations_are_asked_for_where_they_are_wanted() -> None:
    wanted = sweep(runner="{ per_iteration = true }").file
    grid = deal(launch_of(TRIALS), max_blocks=1000)
    for program, there in ((NEW, True), (OLD, False)):
        argv = arguments(program, launch_of(TRIALS), grid, wanted, gpus=8, json="/w/rows.json")
        assert ("-I" in argv) == there


def test_small_messages_get_more_calls_in_a_process_of_their_own() -> None:
    made = sweep(sizes='{ list = ["1K", "256K", "512K"] }')
    launches = lay_out(
        round_of(made),
        plays_schedules=True,
        must_read_back=lambda _: True,
        small_bytes=small_bytes(made.file),
    )
    calls = {
        tuple(dict.fromkeys(sorted(p.trial.size_bytes for p in launch.picks))): calls_of(
            launch, NEW, made.file
        ).iterations
        for launch in launches
        if launch.mode is LaunchMode.SWEEP
    }
    assert calls == {(1 << 10, 256 << 10): 200, (512 << 10,): 5}
    many = sweep(iterations="500", sizes='{ min = "64K", max = "1M" }').file
    assert small_bytes(many) == 0


def test_old_release_gets_no_option_that_it_has_not_and_no_warmup_when_calls_count() -> None:
    assert line(OLD, launch_of(TRIALS), gpus=1) == (
        "/opt/all_reduce_perf -b 1048576 -e 4194304 -f 2 -g 1 -n 5 -w 0 -c 1 -d float -N 9"
    )
    forced = launch_of(TRIALS[:1], LaunchMode.FORCED, scheduled=False)
    assert " -w 2 " in line(OLD, forced)


def test_read_back_makes_few_calls_and_asks_for_no_times() -> None:
    back = launch_of(TRIALS, LaunchMode.READ_BACK)
    assert line(NEW, back).endswith("-n 1 -w 1 -c 0 -d float -N 9")
    assert calls_of(back, NEW, MADE.file).per_half == 2
    assert calls_of(launch_of(TRIALS), NEW, MADE.file).per_half == 1 + 5 + 1


def test_sweep_loads_the_plugin_in_its_profile() -> None:
    found = environment(launch_of(TRIALS), PLACES, "/p/lib.so", "00ff")
    assert found.set == {
        "NCCL_DEBUG": "WARN",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_TUNER_PLUGIN": "/p/lib.so",
        "DYNAMICCL_MODE": "sweep",
        "DYNAMICCL_SCHEDULE": "/w/schedule",
        "DYNAMICCL_SCHEDULE_HASH": "00ff",
        "DYNAMICCL_SWEEP_REPORT": "/w/report",
    }
    assert found.unset == CONFIG_VARIABLES


def test_reference_is_the_untouched_environment_whatever_its_trials_say() -> None:
    found = environment(launch_of(TRIALS, LaunchMode.REFERENCE, scheduled=False), PLACES, "", "")
    assert found.set == {}
    assert found.unset == PLUGIN_VARIABLES


def test_read_back_has_a_log_and_dumps() -> None:
    found = environment(launch_of(TRIALS, LaunchMode.READ_BACK), PLACES, "/p/lib.so", "00ff")
    assert found.set["NCCL_DEBUG_SUBSYS"] == "INIT,ENV,TUNING"
    assert found.set["NCCL_DEBUG_FILE"] == "/w/log"
    assert found.set["NCCL_TOPO_DUMP_FILE"] == "/w/topo"
    assert found.set["NCCL_GRAPH_DUMP_FILE"] == "/w/graph"
    assert found.set["DYNAMICCL_MODE"] == "sweep"


def test_forced_launch_leaves_no_other_choice_in_the_environment() -> None:
    ring = [trial for trial in TRIALS if trial.config.key == "Ring/LL/4ch"]
    found = environment(launch_of(ring, LaunchMode.FORCED, scheduled=False), PLACES, "", "")
    assert found.set == {
        "NCCL_DEBUG": "WARN",
        "NCCL_P2P_DISABLE": "1",
        "NCCL_SHM_DISABLE": "1",
        "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "LL",
        "NCCL_MIN_CTAS": "4",
        "NCCL_MAX_CTAS": "4",
    }
    assert found.unset == PLUGIN_VARIABLES
    default = [trial for trial in TRIALS if trial.config == Config()]
    bare = environment(launch_of(default, LaunchMode.FORCED, scheduled=False), PLACES, "", "")
    assert bare.set.keys() == {"NCCL_DEBUG", "NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"}
    assert bare.unset == PLUGIN_VARIABLES


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (Config(), {}),
        (Config(Algorithm.NVLSTree), {"NCCL_ALGO": "NVLSTree"}),
        (Config(None, Protocol.LL128), {"NCCL_PROTO": "LL128"}),
        (Config(None, None, 8), {"NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "8"}),
    ],
)
def test_config_is_forced_by_environment(config: Config, expected: dict[str, str]) -> None:
    assert forced_config(config) == expected
