"""What settings ask for, what NCCL's log says it did, and its own cost model in it."""

from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from dynamiccl.collect.cli import app
from dynamiccl.collect.describe import other_lines
from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.collect.nccl_log import NcclLog, Shell, requested_by
from dynamiccl.datasets import store
from dynamiccl.datasets.costs import read_costs
from dynamiccl.datasets.store import read
from dynamiccl.errors import OutputError
from dynamiccl.nccl import Algorithm, Collective
from tests.collect.parsed import INPUTS
from tests.data_sets import SWEEP, make_data
from tests.published import COPIES


def log(*lines: str) -> NcclLog:
    found = NcclLog()
    for line in lines:
        found.note(f"n1:1:1 [0] NCCL INFO {line}")
    return found


RING = "-> Algo RING proto LL channel{Lo..Hi}="


def test_choices_of_calls() -> None:
    for lines, ranks, choices, disagreeing in (
        # As each release writes it.
        (["64 Bytes -> Algo 1 proto 2 time 37.798233"], 8, {64: ("Ring", "Simple", None)}, []),
        (["AllReduce: 64 Bytes -> Algo 0 proto 0 time 3.1"], 8, {64: ("Tree", "LL", None)}, []),
        ([f"AllReduce: 64 Bytes {RING}{{2..5}}"], 8, {64: ("Ring", "LL", 4)}, []),
        (
            ["AllReduce: 64 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15} cga 4"],
            *(8, {64: ("NVLSTree", "Simple", 16)}, []),
        ),
        # The size of AllGather is that of a rank from 2.24 on.
        ([f"AllGather: 1024 Bytes {RING}{{0..0}}"], 4, {4096: ("Ring", "LL", 1)}, []),
        ([f"AllGather: 1024 Bytes {RING}{{0..0}}"], None, {}, []),
        (["AllGather: 1024 Bytes -> Algo 1 proto 0 time 1"], 4, {1024: ("Ring", "LL", None)}, []),
        ([f"AllReduce: 64 Bytes {RING}{{0..{high}}}" for high in (0, 1)], 2, {}, [64]),
        # Other kernels are no config.
        (["AllReduce [Symmetric]: 64 Bytes -> Kernel AllReduce_AGxLL_R nchannels 8"], 2, {}, [64]),
        (["AllReduce: 128 Bytes -> Algo MAGIC proto LL channel{Lo..Hi}={0..0}"], 2, {}, [128]),
    ):
        collective = Collective.AllGather if "AllGather" in lines[0] else Collective.AllReduce
        assert log(*lines).choices(collective, ranks) == (choices, disagreeing), lines


@pytest.mark.parametrize(("settings", "wanted"), INPUTS["requests"])
def test_settings_are_a_request_or_a_profile(settings: dict[str, str], wanted: list[Any]) -> None:
    found = requested_by(settings, Collective.AllReduce)
    names = ("requested_algorithm", "requested_protocol", "requested_num_channels")
    asked = ["-" if found[name] is None else found[name] for name in names]
    assert [*asked, found["launch_profile"]] == wanted
    assert found["is_default"] == (asked == ["-"] * 3)


def test_what_another_tuner_chose_is_not_known() -> None:
    plugins: tuple[dict[str, str | None], ...] = ({"NCCL_TUNER_PLUGIN": "x"}, {"--tuner": "X"})
    for plugin in plugins:
        found = requested_by(plugin, Collective.AllReduce)
        assert (found["is_default"], found["requested_algorithm"]) == (False, None)
        assert requested_by(plugin, Collective.AlltoAll)["is_default"]
        forced = requested_by({**plugin, "NCCL_ALGO": "Ring"}, Collective.AllReduce)
        assert forced["requested_algorithm"] == "Ring"


def test_log_says_which_tuner_is_used_and_what_is_set() -> None:
    for said, name in (
        ("Using nccl_ofi_tuner (v3)", "nccl_ofi_tuner"),
        ("Using tuner plugin A3xTunerPlugin_v2", "A3xTunerPlugin_v2"),
        ("Could not find: libnccl-tuner.so. Using internal tuner plugin.", None),
        ("Failed to find ncclTunerPlugin_v2 symbol, using internal tuner instead.", None),
    ):
        assert log(f"TUNER/Plugin: {said}").settings.get("--tuner") == name
    # What it says in two ways is not believed.
    both = [f"NCCL_ALGO set by environment to {name}" for name in ("Ring", "Tree")]
    assert log(both[0]).settings == {"NCCL_ALGO": "Ring"}
    assert log(*both).settings == {"NCCL_ALGO": None}


#: In place of lines that a benchmark printed.
OUTPUT = ""


def shell(*lines: str) -> dict[str, str | None]:
    """What a benchmark that starts behind these lines finds set."""
    found = Shell()
    for line in lines:
        if line == OUTPUT:
            found.start()
        found.read(line)
    return found.start()


@pytest.mark.parametrize(("lines", "wanted"), INPUTS["shell_lines"])
def test_shell_keeps_exports_and_what_the_command_says(lines: list[str], wanted: list[str]) -> None:
    told = dict(each.split("=", 1) for each in wanted)
    assert shell(*lines) == {name: None if text == "?" else text for name, text in told.items()}


@pytest.mark.parametrize("line", INPUTS["unknown_algo"])
def test_a_value_that_cannot_be_read_is_not_known(line: str) -> None:
    assert shell(line) == {"NCCL_ALGO": None}
    request = requested_by({"NCCL_ALGO": None, "NCCL_PROTO": "LL"}, Collective.AllReduce)
    assert request["requested_protocol"] is None
    assert (request["is_default"], request["launch_profile"]) == (False, "algo=?,proto=LL")


def test_nothing_is_kept_of_secrets_and_logs() -> None:
    for line in (
        "export NCCL_SECRET=hush",
        "NCCL_ALGO_TOKEN=hush ./all_reduce_perf",
        "NCCL INFO NCCL_DEBUG_FILE set by environment to /home/alice/hush",
    ):
        assert (shell(line), log(line).settings) == ({}, {})


HEAD = "lab:1:1 [0] NCCL INFO "
#: Of NCCL 2.29.7, two ranks over sockets: the blocks of Tree, Ring and CollNetDirect, and of PAT.
DEBUG = COPIES / "logs" / "ebpf_broadcast_default_v2.18.nccl_debug.log"
TABLE = [line.partition("INFO ")[2] for line in DEBUG.read_text().splitlines() if " |" in line]
BLOCK, PAT = TABLE[:8], TABLE[16:]


def test_tables_of_several_communicators() -> None:
    """Equal ones are one, others none; an unknown algorithm leaves the others as they are."""
    assert log(*BLOCK, *PAT, *BLOCK, *PAT).cost_table() == log(*BLOCK, *PAT).cost_table()
    other = tuple(line.replace("2.4 |", "2.5 |") for line in BLOCK)
    both = log(*BLOCK, *other)
    assert (len(both.costs), both.cost_table()) == (2, None)
    table = log(*PAT, BLOCK[0].replace("Tree", "Star"), *BLOCK[1:]).cost_table()
    assert {algorithm for _, algorithm, _ in table or {}} == {
        *(Algorithm.PAT, Algorithm.Ring, Algorithm.CollNetDirect)
    }


def test_log_of_a_job_without_a_benchmark_gives_its_table(tmp_path: Path) -> None:
    path = tmp_path / "job.log"
    said = f"{HEAD}comm 0x1 rank 0 nRanks 16 nNodes 2 localRanks 8 localRank 0 MNNVL 0\n"
    path.write_text(said + "".join(f"{HEAD}{line}\n" for line in BLOCK))
    import_files([path], tmp_path / "out", options=ImportOptions(system="lab", gpu="H100"))
    costs = store.read(tmp_path / "out", "costs")
    assert costs.height == 5 * 9
    facts = ("num_ranks", "num_nodes", "ranks_per_node", "gpu", "launch_profile")
    assert costs.select(facts).unique().rows() == [(16, 2, 8, "H100", "default")]
    assert other_lines(tmp_path / "out", ()) == ["lab: 45 cells of NCCL's own cost model"]
    path.write_text(said)
    with pytest.raises(OutputError, match="no row of nccl-tests"):
        import_files([path], tmp_path / "none", options=ImportOptions(system="lab"))


def test_what_nccl_logged_comes_before_what_a_model_says(tmp_path: Path) -> None:
    make_data(tmp_path, SWEEP)
    logged = read_costs(tmp_path)
    asked = "shapes --system sim-4x8 --machine h100-ib --nccl 2.27.5 --group 4x8 --group 2x8"
    assert CliRunner().invoke(app, [*asked.split(), "--out", str(tmp_path)]).exit_code == 0
    both = read_costs(tmp_path)
    assert both.filter(num_nodes=4).equals(logged)
    assert both.filter(num_nodes=2).height > 0
    assert read(tmp_path, "costs").filter(pl.col("sweep") == "modelled", num_nodes=4).height > 0
