"""The nccl-tests runner, with a stand-in for the benchmark.

The stand-in is a shell script that the test writes: it prints output made up in the layout of
nccl-tests 2.17, since a real `all_reduce_perf` needs GPUs. Everything else is real:
the process, its group, its environment, its output and its exit code.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.nccl_tests_runner import (
    NcclTestsRunner,
    build_command,
    build_environment,
)
from dynamiccl.collect.sweep import Sweep, Trial, parse_sweep
from dynamiccl.datasets.rows import measurements_table
from dynamiccl.errors import InvalidSweep, MachineError
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol

TEXT = """
name = "grid"
system = "box"
collectives = ["AllReduce"]
algorithms = ["Ring", "NVLS"]
protocols = ["LL128"]
num_channels = [0, 8]
groups = [{ num_nodes = 1, ranks_per_node = 8 }]
sizes = { min = "1M", max = "1M" }
iterations = 30
warmup_iterations = 7
"""
OUTPUT = """\
# nThread 1 nGpus 8 minBytes 1048576 maxBytes 1048576 step: 1048576(bytes) warmup iters: 7 iters: 30
#
#                                                              out-of-place                in-place
#       size         count      type   redop    root     time   algbw   busbw #wrong     time   algbw
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)  (GB/s)
     1048576        262144     float     sum      -1    100.0   10.49   18.35      0    102.0   10.28   17.99  {wrong}
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 18.17
#
"""  # noqa: E501


def sweep(text: str = TEXT) -> Sweep:
    return parse_sweep(text, where="s.toml")


def stand_in(folder: Path, script: str, name: str = "all_reduce_perf") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return folder


def printing(folder: Path, output: str, *, then: str = "exit 0", first: str = "") -> Path:
    return stand_in(folder, f"{first}\ncat <<'END'\n{output}\nEND\n{then}")


def measure(
    binaries: Path, config: Config | None = None, *, timeout_s: float = 60.0
) -> list[dict[str, Any]]:
    made = sweep()
    runner = NcclTestsRunner(made.file, binaries, timeout_s=timeout_s)
    wanted = config or Config()
    [trial] = [trial for trial in made.trials if trial.config == wanted]
    runner.check([trial])
    return [dict(row) for row in runner.measure(trial, run="cycle-2", repeat=2)]


def test_command_line_of_a_trial() -> None:
    made = sweep()
    command = build_command("/opt/all_reduce_perf", made.file, made.trials[0])
    assert " ".join(command) == (
        "/opt/all_reduce_perf -b 1048576 -e 1048576 -g 8 -n 30 -w 7 -d float -c 1"
    )


@pytest.mark.parametrize(
    ("config", "environment"),
    [
        (Config(), {}),
        (Config(Algorithm.NVLSTree), {"NCCL_ALGO": "NVLSTree"}),
        (Config(None, Protocol.LL128), {"NCCL_PROTO": "LL128"}),
        (Config(None, None, 8), {"NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "8"}),
        (
            Config(Algorithm.Tree, Protocol.Simple, 64),
            {
                "NCCL_ALGO": "Tree",
                "NCCL_PROTO": "Simple",
                "NCCL_MIN_CTAS": "64",
                "NCCL_MAX_CTAS": "64",
            },
        ),
    ],
)
def test_config_is_forced_by_environment(config: Config, environment: dict[str, str]) -> None:
    trial = Trial(Collective.AllReduce, 1, 8, 1 << 20, config)
    assert build_environment(trial) == environment


def test_benchmark_sees_its_arguments_and_the_forced_config(tmp_path: Path) -> None:
    log = tmp_path / "seen"
    note = f'echo "$*|$NCCL_ALGO|$NCCL_PROTO|$NCCL_MAX_CTAS|$HOME" > {log}'
    binaries = printing(tmp_path / "bin", OUTPUT.format(wrong=0), first=note)
    measure(binaries, Config(Algorithm.Ring, Protocol.LL128, 8))
    home = os.environ.get("HOME", "")
    expected = "-b 1048576 -e 1048576 -g 8 -n 30 -w 7 -d float -c 1"
    assert log.read_text().strip() == f"{expected}|Ring|LL128|8|{home}"


def test_output_becomes_a_row_for_each_buffer_placement(tmp_path: Path) -> None:
    rows = measure(
        printing(tmp_path / "bin", OUTPUT.format(wrong=0)), Config(Algorithm.Ring, Protocol.LL128)
    )
    table = measurements_table(rows).to_pylist()
    assert [(r["in_place"], r["time_us"], r["busbw_gbytes_per_s"]) for r in table] == [
        (False, 100.0, 18.35),
        (True, 102.0, 17.99),
    ]
    for row in table:
        assert (row["status"], row["wrong_values"], row["statistic"]) == ("ok", 0, "mean")
        assert (row["system"], row["sweep"], row["run"], row["repeat"]) == (
            "box",
            "grid",
            "cycle-2",
            2,
        )
        assert (row["requested_algorithm"], row["requested_protocol"]) == ("Ring", "LL128")
        assert (row["is_default"], row["verified"], row["actual_algorithm"]) == (False, False, None)
        assert (row["num_ranks"], row["num_nodes"], row["size_bytes"]) == (8, 1, 1 << 20)
        assert (row["source"], row["collective"]) == ("nccl-tests-text", "AllReduce")
        assert row["timestamp"] is not None
    assert table[0]["trial"] != table[1]["trial"]


def test_default_requests_nothing(tmp_path: Path) -> None:
    table = measurements_table(measure(printing(tmp_path / "bin", OUTPUT.format(wrong=0))))
    assert table["is_default"].to_pylist() == [True, True]
    assert table["requested_algorithm"].null_count == 2


def test_wrong_values_are_a_status_of_their_half(tmp_path: Path) -> None:
    rows = measure(printing(tmp_path / "bin", OUTPUT.format(wrong=3), then="exit 7"))
    assert [(row["status"], row["wrong_values"]) for row in rows] == [
        ("ok", 0),
        ("wrong_values", 3),
    ]


def test_failure_keeps_the_last_words(tmp_path: Path) -> None:
    words = "one\ntwo\nhost: Test NCCL failure common.cu:958\n.. pid 7: Test failure\nbye"
    [row] = measure(printing(tmp_path / "bin", words, then="exit 3"))
    assert row["status"] == "failed"
    assert row["reason"] == (
        "exit code 3: host: Test NCCL failure common.cu:958 | .. pid 7: Test failure | bye"
    )
    assert (row.get("time_us"), row["statistic"]) == (None, "none")


def test_words_on_stderr_count_too(tmp_path: Path) -> None:
    [row] = measure(stand_in(tmp_path / "bin", "echo no GPU >&2; exit 2"))
    assert row["reason"] == "exit code 2: no GPU"


def test_success_without_a_row_is_a_failure(tmp_path: Path) -> None:
    [row] = measure(stand_in(tmp_path / "bin", "exit 0"))
    assert (row["status"], row["reason"]) == ("failed", "exit code 0: no output")


def test_killed_benchmark_is_a_failed_row(tmp_path: Path) -> None:
    [row] = measure(stand_in(tmp_path / "bin", "kill -SEGV $$"))
    assert (row["status"], row["reason"]) == ("failed", "exit code -11: no output")


def test_output_that_is_no_text_is_a_failed_row(tmp_path: Path) -> None:
    [row] = measure(stand_in(tmp_path / "bin", r"printf '\377\376\000\n'; exit 1"))
    assert row["status"] == "failed"


def dead(pid: int) -> bool:
    """Whether a process has ended; a zombie of another parent has."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state in {"Z", "X"}


def wait_for(condition: object, seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_hang_is_timed_out_and_its_children_are_gone(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    script = f"sleep 600 &\necho $! $$ > {pids}\necho almost there\nwait"
    begin = time.monotonic()
    [row] = measure(stand_in(tmp_path / "bin", script), timeout_s=0.5)
    assert time.monotonic() - begin < 20.0
    assert (row["status"], row["reason"]) == ("timed_out", "no end after 0.5 s")
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: dead(pid))


def test_interrupting_the_sweep_ends_the_benchmark(tmp_path: Path) -> None:
    """Ctrl-C reaches our process alone: the benchmark has a process group of its own."""
    pids = tmp_path / "pids"
    binaries = stand_in(
        tmp_path / "bin", f"sleep 600 &\necho $! $$ > {pids}.new\nmv {pids}.new {pids}\nwait"
    )
    (tmp_path / "s.toml").write_text(TEXT)
    command = [sys.executable, "-P", "-m", "dynamiccl.collect.cli", "run", "s.toml", "--out", "out"]
    process = subprocess.Popen(
        [*command, "--nccl-tests-dir", str(binaries)],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    try:
        wait_for(pids.exists)
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=20) != 0
    finally:
        process.kill()
        process.wait()
    for pid in map(int, pids.read_text().split()):
        wait_for(lambda pid=pid: dead(pid))


def test_infeasible_trial_starts_no_process(tmp_path: Path) -> None:
    mark = tmp_path / "ran"
    binaries = stand_in(tmp_path / "bin", f"touch {mark}")
    [row] = measure(binaries, Config(Algorithm.NVLS, Protocol.LL128))
    assert (row["status"], row["reason"]) == ("infeasible", "NVLS has no LL128 for AllReduce")
    assert not mark.exists()


def test_missing_binary_says_where_it_was_looked_for(tmp_path: Path) -> None:
    made = sweep()
    runner = NcclTestsRunner(made.file, tmp_path)
    with pytest.raises(MachineError, match=rf"no executable all_reduce_perf in {tmp_path}; build"):
        runner.check(made.trials)


def test_file_that_cannot_be_run_is_no_binary(tmp_path: Path) -> None:
    (tmp_path / "all_reduce_perf").write_text("#!/bin/sh\n")
    made = sweep()
    with pytest.raises(MachineError, match="no executable"):
        NcclTestsRunner(made.file, tmp_path).check(made.trials)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("num_nodes = 1", "num_nodes = 2", "groups must have num_nodes = 1, not 2"),
        ('"AllReduce"', '"AlltoAll"', "no nccl-tests binary tunes AlltoAll; choose from AllReduce"),
        ("iterations", "simulator.congestion_levels = [1.0]\niterations", "leave it at"),
    ],
)
def test_sweep_that_one_process_cannot_measure_is_refused(
    old: str, new: str, said: str, tmp_path: Path
) -> None:
    made = sweep(TEXT.replace(old, new, 1))
    binaries = printing(tmp_path / "bin", OUTPUT)
    with pytest.raises(InvalidSweep, match=said):
        NcclTestsRunner(made.file, binaries).check(made.trials)
