"""The stand-in's mishaps: exit statuses and last words, as the real programs have them."""

import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.fakes.nccl_tests.install import install_stand_in
from tests.fakes.nccl_tests.releases import NCCL_RELEASES, TESTS_RELEASES
from tests.fakes.nccl_tests.world import expand_nodes, world_of
from tests.fakes.recording import build_recorder, compiler
from tests.fakes.running import StandIn, environment, times_us

NCCL = [str(release) for release in NCCL_RELEASES]
needs_compiler = pytest.mark.skipif(compiler() is None, reason="there is no C++ compiler")
LADDER = ("-b", "1K", "-e", "64M", "-f", "8", "-g", "8")


@pytest.fixture(scope="module")
def stand_in(tmp_path_factory: pytest.TempPathFactory) -> StandIn:
    return StandIn(install_stand_in(tmp_path_factory.mktemp("nccl-tests")))


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_recorder(tmp_path_factory.mktemp("recorder"))


@pytest.mark.parametrize("version", NCCL)
def test_impossible_choice_fails_from_2_24_and_is_ring_before(
    stand_in: StandIn, version: str
) -> None:
    settings = {"FAKE_NCCL_VERSION": version, "NCCL_ALGO": "PAT", "NCCL_PROTO": "LL"}
    done = stand_in.run("all_reduce_perf", "-g", "8", settings=settings)
    if version < "2.24":
        assert done.returncode == 0
        assert len(times_us(done.stdout)) == 2
        return
    assert done.returncode == 3
    start = "No" if version >= "2.30" else "Error : no"
    reason = (
        f"{start} algorithm/protocol available for function AllReduce with datatype ncclFloat32. "
        "NCCL_ALGO was set to PAT. NCCL_PROTO was set to LL."
    )
    first, *places = done.stdout.splitlines()[-5:]
    assert ": Test NCCL failure common.cu:619 'invalid usage (run with NCCL_DEBUG=WARN" in first
    assert first.endswith(f" / {reason}'")
    assert all(" pid " in place and ": Test failure " in place for place in places)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"NCCL_ALGO": "NVLS_TREE"}, 'Unrecognized element token "NVLS_TREE"'),
        ({"NCCL_PROTO": "scatter:LL"}, 'Unrecognized prefix token "scatter"'),
        ({"NCCL_ALGO": "allreduce:Ring;Tree"}, "must have a prefix"),
        ({"NCCL_TESTS_DEVICE": "0", "SLURM_NTASKS": "2"}, "Duplicate GPU detected"),
        ({"FAKE_INIT_FAILS": "1"}, "internal error"),
    ],
)
def test_communicator_that_cannot_be_made_ends_before_the_table(
    stand_in: StandIn, settings: dict[str, str], said: str
) -> None:
    done = stand_in.run("all_reduce_perf", settings=settings)
    assert done.returncode == 3
    assert said in done.stdout
    assert "common.cu:222" in done.stdout
    assert "out-of-place" not in done.stdout


def test_names_that_nccl_does_not_know_were_ignored_before_2_24(stand_in: StandIn) -> None:
    settings = {"NCCL_ALGO": "Ring,NVLS_TREE", "FAKE_NCCL_VERSION": "2.23.4"}
    assert stand_in.run("all_reduce_perf", "-g", "8", settings=settings).returncode == 0


@pytest.mark.parametrize(
    ("version", "status"),
    list(zip(map(str, TESTS_RELEASES), (1, 1, 6, 7, 7, 7, 7), strict=True)),
)
def test_wrong_values_are_counted_and_fail(stand_in: StandIn, version: str, status: int) -> None:
    settings = {"FAKE_NCCL_TESTS_VERSION": version, "FAKE_WRONG": "NVLS/Simple"}
    done = stand_in.run("all_reduce_perf", *LADDER, settings=settings)
    assert done.returncode == status
    rows = [line.split() for line in done.stdout.splitlines() if line.strip()[:1].isdecimal()]
    # 4 MiB and 32 MiB run with NVLS.
    assert [row[8] for row in rows] == ["0"] * 4 + ["136"] * 2
    assert ": 4 FAILED\n" in done.stdout
    unchecked = stand_in.run("all_reduce_perf", *LADDER, "-c", "0", settings=settings)
    assert unchecked.returncode == 0
    assert "N/A" in unchecked.stdout


def test_low_bandwidth_fails_like_wrong_values(stand_in: StandIn) -> None:
    done = stand_in.run("all_reduce_perf", *LADDER, settings={"NCCL_TESTS_MIN_BW": "1000"})
    assert done.returncode == 7
    assert " FAILED\n#\n" in done.stdout
    fine = stand_in.output("all_reduce_perf", *LADDER, settings={"NCCL_TESTS_MIN_BW": "1"})
    assert " OK\n#\n" in fine


@pytest.mark.parametrize("key", ["Ring/LL", "Ring/LL/16ch", "ABSTAIN@AllReduce"])
def test_crash_is_a_segmentation_fault_in_the_first_timed_call(stand_in: StandIn, key: str) -> None:
    done = stand_in.run("all_reduce_perf", *LADDER, settings={"FAKE_CRASH": key})
    assert done.returncode == -signal.SIGSEGV
    before = {"Ring/LL": 0, "ABSTAIN@AllReduce": 0, "Ring/LL/16ch": 3}[key]
    assert len(times_us(done.stdout)) == 2 * before
    other = {"FAKE_CRASH": "Ring/LL@AllGather"}
    assert stand_in.run("all_reduce_perf", *LADDER, settings=other).returncode == 0


def test_hang_shows_the_rows_before_it_and_ends_by_a_signal(stand_in: StandIn) -> None:
    process = subprocess.Popen(
        [str(stand_in.folder / "all_reduce_perf"), *LADDER],
        env=environment({"FAKE_HANG": "NVLS/Simple"}),
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    seen = []
    for line in process.stdout:
        seen.append(line)
        if line.lstrip().startswith("524288 "):
            break
    assert len(times_us("".join(seen))) == 8
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(timeout=0.2)
    process.terminate()
    assert process.wait(timeout=10) == -signal.SIGTERM
    process.stdout.close()


def test_time_limit_of_the_program_ends_a_hang(stand_in: StandIn) -> None:
    done = stand_in.run("all_reduce_perf", *LADDER, "-T", "1", settings={"FAKE_HANG": "Ring/LL"})
    assert done.returncode == 4
    assert ": Test timeout (1s) common.cu:523\n" in done.stdout


def test_memory_and_devices_that_are_not_there(stand_in: StandIn) -> None:
    full = stand_in.run("all_reduce_perf", "-g", "8", settings={"FAKE_OOM": "1"})
    assert full.returncode == 3
    assert "Test NCCL failure common.cu:1107 'unhandled cuda error" in full.stdout
    few = stand_in.run("all_reduce_perf", "-g", "8", settings={"FAKE_GPUS": "2"})
    assert few.returncode == 5
    assert "Invalid number of GPUs: 8 requested but only 2 were found." in few.stderr
    settings = {"FAKE_GPUS": "2", "FAKE_NCCL_TESTS_VERSION": "2.13.12"}
    old = stand_in.run("all_reduce_perf", "-g", "8", settings=settings)
    assert old.returncode == 2
    assert "Test CUDA failure" in old.stdout


def test_slow_start_and_slow_rows_take_their_time(stand_in: StandIn) -> None:
    started = time.monotonic()
    settings = {"FAKE_SLOW_START": "0.3", "FAKE_SECONDS_PER_ROW": "0.2"}
    stand_in.output("all_reduce_perf", "-b", "1K", "-e", "2K", "-f", "2", settings=settings)
    assert time.monotonic() - started > 0.7


def test_reader_that_goes_away_ends_it_silently(stand_in: StandIn) -> None:
    command = f"{stand_in.folder}/all_reduce_perf -b 8 -e 1G -f 2 -N 50 | head -1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"],
        env=environment(None),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


def test_releases_that_cannot_be_played_are_named(stand_in: StandIn) -> None:
    done = stand_in.run("all_reduce_perf", settings={"FAKE_NCCL_VERSION": "2.20.5"})
    assert done.returncode == 125
    assert "FAKE_NCCL_VERSION=2.20.5: choose from 2.21.5, 2.22.3" in done.stderr


@needs_compiler
@pytest.mark.parametrize(("call", "place"), [("init", "common.cu:222"), ("ask", "common.cu:619")])
@pytest.mark.parametrize("version", NCCL)
def test_tuner_s_error_is_nccl_s_error(
    stand_in: StandIn, recorder: Path, version: str, call: str, place: str
) -> None:
    settings = {
        "NCCL_TUNER_PLUGIN": str(recorder),
        "FAKE_NCCL_VERSION": version,
        "RECORD_ERROR": call,
    }
    done = stand_in.run("all_reduce_perf", "-g", "2", settings=settings)
    assert done.returncode == 3
    assert f"Test NCCL failure {place} 'invalid usage" in done.stdout


@needs_compiler
@pytest.mark.parametrize(
    ("settings", "number"),
    [
        ({"RECORD_UNAVAILABLE": "1"}, signal.SIGFPE),
        ({"RECORD_FORCE": "1,0,256"}, signal.SIGFPE),
        ({"RECORD_FORCE": "1,0,-3"}, signal.SIGFPE),
        ({"RECORD_CHUNK": "0", "FAKE_NCCL_VERSION": "2.30.7"}, signal.SIGFPE),
    ],
)
def test_answer_that_nccl_does_not_check_kills_it(
    stand_in: StandIn, recorder: Path, settings: dict[str, str], number: signal.Signals
) -> None:
    done = stand_in.run(
        "all_reduce_perf", "-g", "2", settings={"NCCL_TUNER_PLUGIN": str(recorder), **settings}
    )
    assert done.returncode == -number


@needs_compiler
def test_ranks_that_disagree_wait_for_each_other_for_ever(
    stand_in: StandIn, recorder: Path
) -> None:
    settings = {"NCCL_TUNER_PLUGIN": str(recorder), "RECORD_DISAGREE": "1"}
    with pytest.raises(subprocess.TimeoutExpired):
        stand_in.run("all_reduce_perf", "-g", "2", settings=settings, timeout_s=2)
    assert stand_in.run("all_reduce_perf", "-g", "1", settings=settings).returncode == 0


@pytest.mark.parametrize(
    ("variables", "rank", "hosts"),
    [
        ({}, 0, ["me"]),
        ({"SLURM_PROCID": "1", "SLURM_NTASKS": "2"}, 1, ["me", "me"]),
        # A batch script itself is one process, whatever the job may use.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "7"}, 0, ["me"]),
        (
            {
                "SLURM_PROCID": "2",
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_STEP_NUM_NODES": "2",
                "SLURM_STEP_NODELIST": "first,me",
            },
            2,
            ["first", "first", "me", "me"],
        ),
        (
            {"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "4"}
            | {"OMPI_COMM_WORLD_LOCAL_SIZE": "2", "SLURM_NNODES": "9", "SLURM_NTASKS": "9"},
            0,
            ["me", "me", "me-n1", "me-n1"],
        ),
        ({"PMIX_RANK": "1", "SLURM_NTASKS": "2"}, 1, ["me", "me"]),
    ],
)
def test_processes_are_known_from_the_launcher(
    variables: dict[str, str], rank: int, hosts: list[str]
) -> None:
    world = world_of({"SLURMD_NODENAME": "me", **variables})
    assert (world.rank, world.host) == (rank, "me")
    assert list(world.hosts) == hosts
    assert world.num_nodes == len(set(hosts))


def test_slurm_s_node_lists() -> None:
    assert expand_nodes("a[1-2,09-11],b,c[3]") == ["a1", "a2", "a09", "a10", "a11", "b", "c3"]
    assert expand_nodes("") == []
