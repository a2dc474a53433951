from pathlib import Path

import pytest

from dynamiccl.collect.benchmark import programs
from dynamiccl.collect.benchmark.programs import BINARIES, Program, find_program
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Collective
from tests.fakes.nccl_tests.install import install_stand_in


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return install_stand_in(tmp_path_factory.mktemp("bin"))


def find(directory: Path | None, *, mpi: bool = False) -> Program:
    return find_program(Collective.AllReduce, directory, mpi=mpi)


def script(path: Path, body: str) -> Path:
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


HELP = "echo 'USAGE: x [-b,--minbytes] [-e,--maxbytes] [-n,--iters] [-w,--warmup_iters]'"


@pytest.mark.parametrize(
    ("release", "cycles", "json", "iterations"),
    [
        ("2.13.12", True, False, False),
        ("2.16.9", True, False, False),
        ("2.17.3", True, True, False),
        ("2.18.2", True, True, False),
        ("2.19.2", True, True, True),
        ("2.19.6", True, True, True),
    ],
)
def test_options_are_those_of_the_release(
    release: str,
    cycles: bool,
    json: bool,
    iterations: bool,
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("FAKE_NCCL_TESTS_VERSION", release)
    found = find(built)
    assert found.path == str(built / "all_reduce_perf")
    assert (found.has_cycles, found.has_json, found.has_iteration_times) == (
        cycles,
        json,
        iterations,
    )
    assert found.warms_up_each_size == json


def test_program_without_cycles_says_so(tmp_path: Path) -> None:
    script(tmp_path / "all_reduce_perf", HELP)
    found = find(tmp_path)
    assert found.options == frozenset("benw")
    assert not found.has_cycles


def test_every_binary_is_there(built: Path) -> None:
    for collective, name in BINARIES.items():
        assert find_program(collective, built, mpi=False).path.endswith(f"/{name}")


def test_build_with_mpi_is_preferred_where_ranks_are_processes(tmp_path: Path) -> None:
    plain = script(tmp_path / "all_reduce_perf", HELP)
    assert find(tmp_path, mpi=True).path == str(plain)
    other = script(tmp_path / "all_reduce_perf_mpi", HELP)
    assert find(tmp_path, mpi=True).path == str(other)
    assert find(tmp_path).path == str(plain)
    plain.unlink()
    assert find(tmp_path).path == str(other)


def test_without_a_directory_the_path_is_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = script(tmp_path / "all_reduce_perf", HELP)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    assert find(None).path == str(wanted)


def test_relative_directory_is_made_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "build").mkdir()
    wanted = script(tmp_path / "build" / "all_reduce_perf", HELP)
    monkeypatch.chdir(tmp_path)
    assert find(Path("build")).path == str(wanted)


@pytest.mark.parametrize("mpi", [False, True])
def test_missing_binary_is_named_with_the_fix(mpi: bool, tmp_path: Path) -> None:
    with pytest.raises(MachineError) as error:
        find(tmp_path, mpi=mpi)
    assert f"no executable all_reduce_perf in {tmp_path}; build nccl-tests" in str(error.value)
    assert ("with MPI=1" in str(error.value)) == mpi
    assert "--nccl-tests-dir" in str(error.value)
    with pytest.raises(MachineError, match="no executable"):
        find(tmp_path / "gone")


def test_file_that_cannot_be_executed_is_none(tmp_path: Path) -> None:
    (tmp_path / "all_reduce_perf").write_text("source")
    with pytest.raises(MachineError, match="no executable"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("echo hello; exit 3", r"exit code 3, output: hello"),
        ("exit 0", r"exit code 0, output: nothing"),
        ("echo 'libnccl.so.2: cannot open' >&2; exit 127", r"output: libnccl\.so\.2: cannot open"),
        (r"printf '\377\376'", r"exit code 0"),
        ("kill -SEGV $$", r"exit code -11"),
    ],
)
def test_another_program_is_refused_with_its_last_line(
    body: str, said: str, tmp_path: Path
) -> None:
    script(tmp_path / "all_reduce_perf", body)
    with pytest.raises(MachineError, match=said):
        find(tmp_path)


def test_program_that_does_not_run_is_refused(tmp_path: Path) -> None:
    broken = tmp_path / "all_reduce_perf"
    broken.write_text("#!/no/such/interpreter\n")
    broken.chmod(0o755)
    with pytest.raises(MachineError, match="-h does not run"):
        find(tmp_path)


def test_program_that_does_not_answer_is_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(programs, "_HELP_TIMEOUT_S", 0.1)
    script(tmp_path / "all_reduce_perf", "exec sleep 600")
    with pytest.raises(MachineError, match=r"-h does not run: .* timed out"):
        find(tmp_path)


def test_collective_without_a_binary_is_refused_with_the_choices(built: Path) -> None:
    without = next(c for c in Collective if c not in BINARIES)
    with pytest.raises(InvalidSweep, match=f"no nccl-tests binary for {without.wire}; choose from"):
        find_program(without, built, mpi=False)
