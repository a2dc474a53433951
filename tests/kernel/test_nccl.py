from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.errors import UnknownName, UserError
from dynamiccl.libraries import check_fingerprint, node_part, with_nccl
from dynamiccl.nccl import (
    ABSTAIN,
    MAX_CHANNELS,
    Algorithm,
    Collective,
    Config,
    NcclVersion,
    Protocol,
    invalid_reason,
)

#: What NCCL can run, by hand (src/graph/tuning.cc, v2.30.7-1): L = LL, 8 = LL128, S = Simple.
ALL_REDUCE = {"Ring": "L8S", "Tree": "L8S"} | dict.fromkeys(
    ("CollNetDirect", "CollNetChain", "NVLS", "NVLSTree"), "S"
)
GATHER = {"Ring": "L8S", "CollNetDirect": "S", "NVLS": "S", "PAT": "S"}
VALID = {
    "AllReduce": ALL_REDUCE,
    "AllGather": GATHER,
    "ReduceScatter": GATHER,
    "Broadcast": {"Ring": "L8S"},
    "Reduce": {"Ring": "L8S"},
}
AR, AG = Collective.AllReduce, Collective.AllGather
TREE, RING, PAT = Algorithm.Tree, Algorithm.Ring, Algorithm.PAT
NVLS, NVLS_TREE = Algorithm.NVLS, Algorithm.NVLSTree
LL, SIMPLE = Protocol.LL, Protocol.Simple
LETTER = {Protocol.LL: "L", Protocol.LL128: "8", Protocol.Simple: "S"}


H100 = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809"


def test_numbers_and_names_are_nccls_in_every_spelling() -> None:
    algorithms = ["Tree", "Ring", "CollNetDirect", "CollNetChain", "NVLS", "NVLSTree", "PAT"]
    assert [a.wire for a in sorted(Algorithm)] == algorithms
    assert [p.wire for p in sorted(Protocol)] == ["LL", "LL128", "Simple"]
    tuned = ["Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"]
    assert [c.wire for c in sorted(Collective) if c.tunable] == tuned
    for kind in (Algorithm, Collective, Protocol):
        for member in kind:
            assert kind.parse(member.wire) is kind.parse(member.wire.upper()) is member
    for text in ("NVLS_TREE", "nvls-tree", "NVLS Tree"):
        assert Algorithm.parse(text) is Algorithm.NVLSTree
    for text in ("REDUCE_SCATTER", "reduce-scatter"):
        assert Collective.parse(text) is Collective.ReduceScatter
    with pytest.raises(UnknownName) as caught:
        Protocol.parse("LL127", where="row 3")
    assert str(caught.value) == (
        "unknown protocol 'LL127' in row 3 (did you mean 'LL128'?); choose from LL, LL128, Simple"
    )


def test_bus_factor_is_that_of_nccl_tests() -> None:
    """doc/PERFORMANCE.md of nccl-tests, of 4 ranks and of one."""
    plain = {Collective.Broadcast, Collective.Reduce, Collective.SendRecv}
    for collective in Collective:
        twice = 2 if collective is Collective.AllReduce else 1
        expected = (1.0, 1.0) if collective in plain else (twice * 3 / 4, 0.0)
        assert (collective.bus_factor(4), collective.bus_factor(1)) == expected


@given(minor=st.integers(0, 99), patch=st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_version_is_read_from_code_and_text(minor: int, patch: int) -> None:
    version = NcclVersion(2, minor, patch)
    assert NcclVersion.parse(f"{version}+cuda12.9") == version
    known: dict[str | int, tuple[int, ...]] = {22907: (2, 29, 7), "2.30": (2, 30), 2708: (2, 7, 8)}
    for text, parts in {**known, "2804": (2, 8, 4), "20906": (2, 9, 6)}.items():
        assert NcclVersion.parse(text) == NcclVersion(*parts)
    assert NcclVersion.parse(version.code) == version
    assert NcclVersion.parse(str(version)) == version
    assert NcclVersion(2, minor, patch) < NcclVersion(2, minor + 1) < NcclVersion(2, minor + 1, 1)


def test_what_is_no_version_is_refused() -> None:
    for text in ["", "two", "2", "v2.29.7", "2290700", "229"]:
        with pytest.raises(UnknownName, match="NCCL version"):
            NcclVersion.parse(text)


def test_validity_is_nccl_s_table() -> None:
    for collective in [c for c in Collective if c.tunable]:
        for algorithm in Algorithm:
            allowed = VALID[collective.wire].get(algorithm.wire, "")
            for protocol in Protocol:
                reason = invalid_reason(Config(algorithm, protocol), collective)
                is_valid = LETTER[protocol] in allowed
                assert (reason is None) == is_valid, (algorithm, protocol, reason)
            # With the protocol left to NCCL, an algorithm is valid when any protocol is.
            assert (invalid_reason(Config(algorithm), collective) is None) == bool(allowed)


def test_reason_says_what_does_not_fit() -> None:
    table: list[tuple[Config, Collective, dict[str, Any], str | None]] = [
        (Config(NVLS, LL), AR, {}, "NVLS has no LL for AllReduce"),
        (Config(TREE), Collective.Broadcast, {}, "Broadcast has no Tree"),
        (Config(RING), Collective.AlltoAll, {}, "NCCL never asks a tuner about AlltoAll"),
        (Config(PAT, SIMPLE), AG, {"version": (2, 22, 99)}, "PAT needs NCCL 2.23.0 and this is 2."),
        (Config(PAT, SIMPLE), AG, {"version": (2, 23)}, None),
        (Config(NVLS_TREE, SIMPLE), AR, {"num_nodes": 1}, "NVLSTree needs more than one node"),
        (Config(NVLS_TREE, SIMPLE), AR, {"num_nodes": 2}, None),
        *((Config(RING, None, n), AR, {}, f"{n} channels are outside 1..64") for n in (-1, 0, 65)),
        *((Config(None, None, n), AR, {}, None) for n in (1, MAX_CHANNELS)),
        (Config(RING, LL, 64), AR, {"version": (2, 25)}, None),
        (Config(RING, LL, 64), AR, {"version": (2, 24, 3)}, "64 channels are outside 1..32"),
        (Config(RING, SIMPLE, None, 1 << 20), AR, {"version": (2, 30, 3)}, None),
        (Config(RING, SIMPLE, None, 1 << 20), AR, {"version": (2, 29)}, "a chunk size needs NCCL"),
        *((ABSTAIN, each, {"version": (2, 18), "num_nodes": 1}, None) for each in Collective),
    ]
    for config, collective, where, reason in table:
        version = NcclVersion(*where["version"]) if "version" in where else None
        found = invalid_reason(config, collective, **where | {"version": version})
        assert found is None if reason is None else str(found).startswith(reason), config


def test_a_fingerprint_is_of_counted_and_sorted_models() -> None:
    node = node_part(["B", "A", "B"], mig=True, nic_kind="socket", num_nics=1)
    assert node == "gpu=A*1+B*2;mig=1;nic=socket*1"
    for text in (H100, "gpu=none*0;mig=0;nic=none*0;nccl=0", f"{node};nccl=22809"):
        assert check_fingerprint(text) == text
    assert with_nccl(node, NcclVersion(2, 28, 9)) == f"{node};nccl=22809"


def test_anything_else_is_refused_with_an_example() -> None:
    for text in ["", H100 + "\n"]:
        with pytest.raises(UserError, match="one looks like 'gpu=NVIDIA H100"):
            check_fingerprint(text)
