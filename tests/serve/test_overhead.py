"""`doctor --overhead` with a stand-in for nccl-tests: the arithmetic, and when it refuses."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamiccl.serve.overhead import (
    ABSTAINING,
    RECORDING,
    VARIANTS,
    WITHOUT,
    compare,
    environment,
    read_times,
)
from tests.cli.conftest import Shell, refused

TEXT = """\
# nThread 1 nGpus 2 minBytes 8 maxBytes 67108864 step: 2(factor) warmup iters: 20 iters: 200
#       size         count      type   redop    root     time   algbw   busbw #wrong     time
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)            (us)
           8             2     float     sum      -1    12.34    0.00    0.00    N/A    13.00
     1048576        262144     float     sum      -1   100.00   10.49   18.35    N/A    99.00
# Out of bounds values : 0 OK
"""
#: Ten per cent more where it records, one where it abstains; says what it was started with.
FAKE = """\
#!/bin/sh
time=100.00
[ -n "$NCCL_TUNER_PLUGIN" ] && time=101.00
[ "$DYNAMICCL_MODE" = observe ] && time=110.00
echo "$*|$NCCL_TUNER_PLUGIN|$NCCL_PROFILER_PLUGIN|$DYNAMICCL_CALLS_DIR" >> "$LOG"
echo "           8             2     float     sum      -1   $time    0.00    0.00    N/A    1.00"
"""


@pytest.fixture(name="node")
def node_fixture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int, str], Path]:
    def make(num_gpus: int, benchmark: str) -> Path:
        folder = tmp_path / "bin"
        folder.mkdir()
        lines = "".join(f"echo 'GPU {i}: NVIDIA H100 (UUID: GPU-{i})'\n" for i in range(num_gpus))
        for name, text in (("nvidia-smi", f"#!/bin/sh\n{lines}"), ("all_reduce_perf", benchmark)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
        monkeypatch.setenv("LOG", str(tmp_path / "log"))
        return folder

    return make


def test_times_are_read_from_the_text() -> None:
    assert read_times(TEXT) == {8: 12.34, 1048576: 100.0}
    assert read_times("") == {}


def test_variants_take_turns_and_differences_are_within_a_round() -> None:
    order: list[str] = []

    def run(variant: str) -> dict[int, float]:
        order.append(variant)
        drift = 1.0 + 0.1 * (len(order) // len(VARIANTS))  # the machine gets slower
        return {8: drift * {WITHOUT: 10.0, ABSTAINING: 10.0, RECORDING: 11.0}[variant]}

    found = compare(run, num_gpus=2, rounds=3)
    assert order[:3] == [WITHOUT, ABSTAINING, RECORDING]
    assert order[3:6] == [ABSTAINING, RECORDING, WITHOUT]
    costs = {cost.variant: cost for cost in found.costs}
    recording = costs[RECORDING]
    assert recording.low_percent <= recording.median_percent <= recording.high_percent
    assert recording.median_percent > costs[ABSTAINING].median_percent


def test_environments_differ_by_the_plugin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_TUNER_PLUGIN", "/vendor.so")
    monkeypatch.setenv("DYNAMICCL_ARTIFACT", "/a")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    plain, abstaining, recording = (
        environment(variant, Path("/p.so"), Path("/calls")) for variant in VARIANTS
    )
    assert plain["NCCL_DEBUG"] == "WARN"
    assert "NCCL_TUNER_PLUGIN" not in plain
    assert "DYNAMICCL_ARTIFACT" not in abstaining
    assert abstaining["NCCL_TUNER_PLUGIN"] == "/p.so"
    assert "NCCL_TUNER_PLUGIN" not in recording
    assert recording["DYNAMICCL_CALLS_DIR"] == "/calls"


def test_command_measures(
    node: Callable[[int, str], Path], plugin_path: Path, shell: Shell, tmp_path: Path
) -> None:
    folder = node(2, FAKE)
    options = ("--nccl-tests-dir", folder, "--plugin", plugin_path, "--rounds", 3)
    command = ("dynamiccl-deploy", "doctor", "--overhead", *options)
    said = shell(*command, "--json").json
    assert (said["num_gpus"], said["num_rounds"]) == (2, 3)
    assert said["medians_us"]["8"] == {WITHOUT: 100.0, ABSTAINING: 101.0, RECORDING: 110.0}
    by_variant = {cost["variant"]: cost for cost in said["costs"]}
    assert by_variant[RECORDING]["median_percent"] == pytest.approx(10.0)
    assert by_variant[ABSTAINING]["high_percent"] == pytest.approx(1.0)
    assert "-g 2|" in (tmp_path / "log").read_text()
    text = shell(*command).out
    assert "recording: +10.00 % of the time without" in text
    assert "2 GPUs, 3 rounds" in text


def test_command_refuses_where_nothing_can_be_measured(
    node: Callable[[int, str], Path], plugin_path: Path, shell: Shell, tmp_path: Path
) -> None:
    folder = node(2, "#!/bin/sh\necho 'CUDA error' >&2; exit 1\n")
    options = ("--overhead", "--plugin", plugin_path, "--nccl-tests-dir")
    doctor = ("dynamiccl-deploy", "doctor", *options)
    assert "ended with 1: CUDA error" in refused(shell(*doctor, folder), 4)
    assert "build nccl-tests" in refused(shell(*doctor, tmp_path), 4)
    (folder / "nvidia-smi").write_text("#!/bin/sh\necho 'No devices were found'; exit 6\n")
    assert "0 GPUs here" in refused(shell(*doctor, folder), 4)
