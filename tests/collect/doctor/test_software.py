"""nccl-tests, NCCL, plugins and settings."""

import sys
from dataclasses import replace

import pytest

from dynamiccl.checks import Verdict
from dynamiccl.collect.doctor.context import Context
from dynamiccl.nccl import Collective
from dynamiccl.nccl_setup import ASK_TUNER, ASK_VERSION
from tests.collect.doctor.recorded import ABSENT, BINARY, HEALTHY, HELP, LDD, PLUGIN, findings

OK, WARN, FAIL, UNKNOWN = Verdict.OK, Verdict.WARN, Verdict.FAIL, Verdict.UNKNOWN
LIBRARY = "/opt/nccl/lib/libnccl.so.2"


def test_a_healthy_node_needs_no_advice() -> None:
    found = findings(HEALTHY)
    assert {check.status for check in found.values()} == {OK}
    assert not any(check.advice for check in found.values())


def test_missing_binaries_are_named() -> None:
    context = Context(collectives=(Collective.AllReduce, Collective.Broadcast))
    check = findings(HEALTHY, context)["nccl-tests"]
    assert (check.status, check.found) == (FAIL, "no binary for Broadcast in PATH")
    assert "--nccl-tests-dir" in check.advice


def test_binaries_are_looked_for_where_the_user_says() -> None:
    found = findings(HEALTHY, Context(nccl_tests_dir="/elsewhere"))
    assert found["nccl-tests"].status is FAIL
    assert "nccl-tests options" not in found
    assert (
        findings(HEALTHY, Context(nccl_tests_dir="/opt/nccl-tests"))["nccl-tests"].found == BINARY
    )


def test_a_binary_with_mpi_is_taken_where_ranks_are_processes() -> None:
    both = replace(HEALTHY, programs={**HEALTHY.programs, "all_reduce_perf_mpi": "/opt/mpi/ar"})
    assert findings(both, Context(launcher="mpirun"))["nccl-tests"].found == "/opt/mpi/ar"
    assert findings(both)["nccl-tests"].found == BINARY


def test_a_collective_without_a_binary_is_missing() -> None:
    found = findings(HEALTHY, Context(collectives=(Collective.Scatter,)))
    assert found["nccl-tests"].found == "no binary for Scatter in PATH"


@pytest.mark.parametrize("option", ["-N", "-J", "-I"])
def test_what_a_release_lacks_is_a_failure(option: str) -> None:
    machine = HEALTHY.answering(BINARY, "-h", output=HELP.replace(f"[{option},", "["))
    context = Context(wants_iteration_times=option == "-I")
    check = findings(machine, context)["nccl-tests options"]
    assert check.status is FAIL
    assert f"lists no {option}" in check.found
    assert "2.17.3" in check.advice


def test_iteration_times_that_nobody_wants_are_not_missed() -> None:
    machine = HEALTHY.answering(BINARY, "-h", output=HELP.replace("[-I,", "["))
    assert findings(machine, Context())["nccl-tests options"].status is OK


def test_a_binary_that_does_not_start_is_quoted() -> None:
    said = "error while loading shared libraries: libcudart.so.12: cannot open"
    machine = HEALTHY.answering(BINARY, "-h", output=said, status=127)
    check = findings(machine)["nccl-tests options"]
    assert check.status is FAIL
    assert "exit status 127" in check.found
    assert "libcudart" in check.found


def test_several_processes_need_mpi() -> None:
    context = Context(launcher="mpirun")
    assert findings(HEALTHY, context)["nccl-tests with MPI"].status is OK
    without = HEALTHY.answering("ldd", BINARY, output=LDD.replace("libmpi", "libm"))
    assert findings(without, context)["nccl-tests with MPI"].status is FAIL
    assert "nccl-tests with MPI" not in findings(without)


def test_nccl_is_the_one_that_the_benchmark_loads() -> None:
    assert findings(HEALTHY)["libnccl"].found == f"NCCL 2.29.7, {LIBRARY}"


def nccl(code: str) -> tuple[str, ...]:
    return (sys.executable, "-c", ASK_VERSION, code)


@pytest.mark.parametrize(
    ("code", "context", "status"),
    [
        ("22105", Context(mode="sweep"), FAIL),
        ("22105", Context(mode="auto"), WARN),
        ("22105", Context(mode="processes"), OK),
        ("22203", Context(mode="sweep"), OK),
        ("22907", Context(wants_chunk_sizes=True), FAIL),
        ("23007", Context(wants_chunk_sizes=True), OK),
        ("who knows", Context(), UNKNOWN),
    ],
)
def test_what_a_version_can_do(code: str, context: Context, status: Verdict) -> None:
    machine = HEALTHY.answering(*nccl(LIBRARY), output=f"{code}\n")
    assert findings(machine, context)["libnccl"].status is status


def test_a_library_that_the_loader_does_not_find_fails() -> None:
    machine = HEALTHY.answering("ldd", BINARY, output="\tlibnccl.so.2 => not found\n")
    assert findings(machine)["libnccl"].found == f"{BINARY} does not find libnccl.so.2"


def test_a_library_that_does_not_load_is_quoted() -> None:
    said = "Traceback (most recent call last):\nOSError: libcudart.so.12: cannot open\n"
    check = findings(HEALTHY.answering(*nccl(LIBRARY), output=said, status=1))["libnccl"]
    assert check.found == f"{LIBRARY} does not load: OSError: libcudart.so.12: cannot open"


def test_nccl_linked_into_the_binary_shows_its_version() -> None:
    asked = ("grep", "-aoEm1", r"NCCL version [0-9]+\.[0-9]+\.[0-9]+", BINARY)
    static = HEALTHY.answering("ldd", BINARY, output="\tnot a dynamic executable\n", status=1)
    assert findings(static)["libnccl"].status is UNKNOWN
    known = static.answering(*asked, output="NCCL version 2.27.5\n")
    assert findings(known)["libnccl"].found == f"NCCL 2.27.5, inside {BINARY}"


def test_without_a_binary_the_usual_library_is_asked() -> None:
    machine = HEALTHY.without("all_reduce").answering(*nccl("libnccl.so.2"), output="22907\n")
    assert findings(machine)["libnccl"].found == "NCCL 2.29.7, libnccl.so.2"


def test_a_vendors_tuner_is_displaced() -> None:
    check = findings(HEALTHY.with_env(NCCL_TUNER_PLUGIN="aws"))["other tuner"]
    assert (check.status, check.found) == (WARN, "NCCL_TUNER_PLUGIN=aws (environment)")


def test_none_is_no_tuner() -> None:
    assert findings(HEALTHY.with_env(NCCL_TUNER_PLUGIN="None"))["other tuner"].status is OK


def test_a_tuner_named_in_a_file_counts() -> None:
    machine = HEALTHY.holding("/etc/nccl.conf", "NCCL_TUNER_PLUGIN=libnccl-ocituner.so\n")
    assert "/etc/nccl.conf" in findings(machine)["other tuner"].found


@pytest.mark.parametrize("role", ["tuner", "profiler"])
def test_a_stray_library_is_picked_up_unasked(role: str) -> None:
    path = f"/opt/vendor/libnccl-{role}.so"
    on_path = HEALTHY.holding(path, "ELF").with_env(LD_LIBRARY_PATH="/empty::/opt/vendor")
    assert findings(on_path)[f"other {role}"].found == f"{path}, which NCCL loads unasked"
    cached = f"\tlibnccl-{role}.so (libc6,x86-64) => {path}\n"
    in_cache = HEALTHY.answering("/sbin/ldconfig", "-p", output=cached)
    assert findings(in_cache)[f"other {role}"].status is WARN


@pytest.mark.parametrize(
    ("value", "library"),
    [
        ("", "/opt/net/libnccl-net.so"),
        ("ofi", "/opt/net/libnccl-net-ofi.so"),
        ("libnccl-net-x.so", "/opt/net/libnccl-net-x.so"),
        ("/opt/net/own.so", "/opt/net/own.so"),
    ],
)
def test_a_network_plugin_may_bring_a_tuner(value: str, library: str) -> None:
    machine = (
        HEALTHY.holding(library, "ELF")
        .with_env(LD_LIBRARY_PATH="/opt/net", NCCL_NET_PLUGIN=value)
        .answering("grep", "-aqE", "ncclTunerPlugin_v[0-9]", library)
    )
    found = findings(machine)
    assert found["other tuner"].found == f"inside the network plugin {library}"
    assert found["other profiler"].status is OK


def test_a_network_plugin_that_is_switched_off_brings_nothing() -> None:
    machine = HEALTHY.with_env(NCCL_NET_PLUGIN="none")
    assert findings(machine)["other tuner"].status is OK


PLUGIN_LOAD = (sys.executable, "-c", ASK_TUNER, PLUGIN)


@pytest.mark.parametrize(("mode", "status"), [("sweep", FAIL), ("auto", WARN)])
def test_our_plugin_must_be_there_and_load(mode: str, status: Verdict) -> None:
    context = Context(mode=mode)
    assert findings(HEALTHY, context)["our plugin"].found.endswith("tuner v2, v3, v4, v5, v6")
    missing = findings(HEALTHY.without(PLUGIN), context)["our plugin"]
    assert (missing.status, missing.found) == (status, f"none at {PLUGIN}")
    said = "OSError: /lib/libc.so.6: version `GLIBC_2.38' not found"
    broken = HEALTHY.answering(*PLUGIN_LOAD, output=said, status=1)
    assert "GLIBC_2.38" in findings(broken, context)["our plugin"].found
    empty = HEALTHY.answering(*PLUGIN_LOAD, output="\n")
    assert findings(empty, context)["our plugin"].status is status
    chatty = HEALTHY.answering(*PLUGIN_LOAD, output="hello\n")
    assert findings(chatty, context)["our plugin"].status is UNKNOWN


def test_processes_need_no_plugin() -> None:
    assert "our plugin" not in findings(HEALTHY.without(PLUGIN), Context(mode="processes"))


def test_settings_are_listed_with_where_they_come_from() -> None:
    machine = (
        HEALTHY.with_env(NCCL_IB_HCA="mlx5", HOME="/root")
        .holding("~/.nccl.conf", "# ours\nNCCL_DEBUG = WARN\nNCCL_IB_HCA=mlx4\n")
        .holding("/etc/nccl.conf", "NCCL_DEBUG=INFO\nNCCL_SOCKET_IFNAME=eth0\n")
    )
    assert findings(machine)["NCCL settings"].found == (
        "NCCL_IB_HCA=mlx5 (environment); NCCL_DEBUG=WARN (~/.nccl.conf); "
        "NCCL_SOCKET_IFNAME=eth0 (/etc/nccl.conf); they are part of the untouched environment"
    )


def test_another_configuration_file_takes_the_users_place() -> None:
    machine = (
        HEALTHY.with_env(NCCL_CONF_FILE="/opt/nccl.conf")
        .holding("~/.nccl.conf", "NCCL_ALGO=Ring\n")
        .holding("/opt/nccl.conf", "NCCL_NET=IB\n")
    )
    check = findings(machine)["NCCL settings"]
    assert check.status is OK
    assert "NCCL_NET=IB (/opt/nccl.conf)" in check.found


@pytest.mark.parametrize(("mode", "status"), [("auto", FAIL), ("processes", WARN)])
def test_a_forced_algorithm_beats_a_tuner(mode: str, status: Verdict) -> None:
    machine = HEALTHY.with_env(NCCL_ALGO="Ring").holding("/etc/nccl.conf", "NCCL_PROTO=LL\n")
    check = findings(machine, Context(mode=mode))["NCCL settings"]
    assert check.status is status
    assert "NCCL_ALGO and NCCL_PROTO beat any tuner" in check.advice


def test_channel_limits_hold_for_every_config() -> None:
    check = findings(HEALTHY.with_env(NCCL_MAX_CTAS="8"))["NCCL settings"]
    assert check.status is WARN
    assert "NCCL_MAX_CTAS limit" in check.advice


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ("1", True),
        ("EFFICIENCY", True),
        ("3", True),
        ("0", False),
        ("2", False),
        ("DEFAULT", False),
    ],
)
def test_a_tuner_switches_the_efficiency_policy_off(value: str, said: bool) -> None:
    found = findings(HEALTHY.with_env(NCCL_CTA_POLICY=value))
    assert ("CTA policy" in found) is said


def test_an_answer_that_is_missing_is_never_a_crash() -> None:
    machine = replace(
        HEALTHY, runs={}, files={}, programs={}, free={"/dev/shm": None, ".": None}, env={}
    )
    assert machine.run("ldd") is ABSENT
    for launcher in ("local", "mpirun", "srun", "sbatch"):
        context = Context(launcher=launcher, interference=frozenset({"gemm", "traffic"}))
        assert findings(machine, context)["nccl-tests"].status is FAIL
        inside = replace(context, container="pyxis")
        assert findings(machine, inside)["container"].status is FAIL
        # What the host has says nothing about the image.
        assert not {"nccl-tests", "libnccl"} & findings(machine, inside).keys()
