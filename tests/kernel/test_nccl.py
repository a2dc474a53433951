import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.errors import UnknownName, UserError
from dynamiccl.fingerprint import check_fingerprint, node_part, with_nccl
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
VALID = {
    "AllReduce": {
        "Ring": "L8S",
        "Tree": "L8S",
        "CollNetDirect": "S",
        "CollNetChain": "S",
        "NVLS": "S",
        "NVLSTree": "S",
    },
    "AllGather": {"Ring": "L8S", "CollNetDirect": "S", "NVLS": "S", "PAT": "S"},
    "ReduceScatter": {"Ring": "L8S", "CollNetDirect": "S", "NVLS": "S", "PAT": "S"},
    "Broadcast": {"Ring": "L8S"},
    "Reduce": {"Ring": "L8S"},
}
AR, AG = Collective.AllReduce, Collective.AllGather
TREE, RING, PAT = Algorithm.Tree, Algorithm.Ring, Algorithm.PAT
NVLS, NVLS_TREE = Algorithm.NVLS, Algorithm.NVLSTree
LL, SIMPLE = Protocol.LL, Protocol.Simple
LETTER = {Protocol.LL: "L", Protocol.LL128: "8", Protocol.Simple: "S"}


H100 = "gpu=NVIDIA H100 80GB HBM3*8;mig=0;nic=infiniband*8;nccl=22809"


@pytest.mark.parametrize(
    ("text", "member"),
    [
        ("NVLS_TREE", Algorithm.NVLSTree),
        ("nvls-tree", Algorithm.NVLSTree),
        ("Coll Net Direct", Algorithm.CollNetDirect),
        ("COLLNET_CHAIN", Algorithm.CollNetChain),
        ("all_reduce", Collective.AllReduce),
        ("All-Gather", Collective.AllGather),
        ("REDUCE_SCATTER", Collective.ReduceScatter),
        ("reduce", Collective.Reduce),
    ],
)
def test_every_spelling_is_read(text: str, member: Algorithm | Collective) -> None:
    assert type(member).parse(text) is member


@pytest.mark.parametrize("kind", [Algorithm, Collective, Protocol])
def test_wire_names_parse_to_themselves(
    kind: type[Algorithm] | type[Collective] | type[Protocol],
) -> None:
    for member in kind:
        assert kind.parse(member.wire) is member
        assert kind.parse(member.wire.upper()) is member


def test_indices_are_those_of_the_cost_table() -> None:
    assert [a.wire for a in sorted(Algorithm)] == [
        "Tree",
        "Ring",
        "CollNetDirect",
        "CollNetChain",
        "NVLS",
        "NVLSTree",
        "PAT",
    ]
    assert [p.wire for p in sorted(Protocol)] == ["LL", "LL128", "Simple"]


def test_tuned_collectives_are_five() -> None:
    tuned = {c.wire for c in Collective if c.tunable}
    assert tuned == {"Broadcast", "Reduce", "AllGather", "ReduceScatter", "AllReduce"}


def test_unknown_protocol_lists_choices() -> None:
    with pytest.raises(UnknownName) as caught:
        Protocol.parse("LL127", where="row 3")
    assert str(caught.value) == (
        "unknown protocol 'LL127' in row 3 (did you mean 'LL128'?); choose from LL, LL128, Simple"
    )


@given(text=st.text(max_size=12))
@settings(deadline=None, max_examples=100)
def test_a_name_is_read_only_when_its_letters_are_a_member(text: str) -> None:
    squashed = re.sub(r"[\s_-]", "", text).lower()
    known = {member.name.lower() for member in Algorithm}
    if squashed in known:
        assert Algorithm.parse(text).name.lower() == squashed
    else:
        with pytest.raises(UnknownName, match="choose from Tree, Ring"):
            Algorithm.parse(text)


@pytest.mark.parametrize(
    ("collective", "factor"),
    [
        # nccl-tests doc/PERFORMANCE.md, 4 ranks.
        (Collective.AllReduce, 2 * 3 / 4),
        (Collective.AllGather, 3 / 4),
        (Collective.ReduceScatter, 3 / 4),
        (Collective.AlltoAll, 3 / 4),
        (Collective.Gather, 3 / 4),
        (Collective.Scatter, 3 / 4),
        (Collective.Broadcast, 1.0),
        (Collective.Reduce, 1.0),
        (Collective.SendRecv, 1.0),
    ],
)
def test_bus_factor_is_that_of_nccl_tests(collective: Collective, factor: float) -> None:
    assert collective.bus_factor(4) == factor
    assert factor == 1.0 or collective.bus_factor(1) == 0.0


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("2.29.7", NcclVersion(2, 29, 7)),
        ("2.29.7+cuda12.9", NcclVersion(2, 29, 7)),
        ("2.30", NcclVersion(2, 30, 0)),
        (22907, NcclVersion(2, 29, 7)),
        ("22907", NcclVersion(2, 29, 7)),
        (2708, NcclVersion(2, 7, 8)),
        ("2804", NcclVersion(2, 8, 4)),
        (20906, NcclVersion(2, 9, 6)),
    ],
)
def test_version_is_read_from_text_and_code(text: str | int, version: NcclVersion) -> None:
    assert NcclVersion.parse(text) == version


@given(minor=st.integers(0, 99), patch=st.integers(0, 99))
@settings(deadline=None, max_examples=200)
def test_version_code_and_text_round_trip(minor: int, patch: int) -> None:
    version = NcclVersion(2, minor, patch)
    assert NcclVersion.parse(version.code) == version
    assert NcclVersion.parse(str(version)) == version
    assert NcclVersion(2, minor, patch) < NcclVersion(2, minor + 1) < NcclVersion(2, minor + 1, 1)


@pytest.mark.parametrize("text", ["", "two", "2", "v2.29.7", "2290700", "229"])
def test_what_is_no_version_is_refused(text: str) -> None:
    with pytest.raises(UnknownName, match="NCCL version"):
        NcclVersion.parse(text)


@pytest.mark.parametrize("collective", [c for c in Collective if c.tunable])
def test_validity_is_nccl_s_table(collective: Collective) -> None:
    for algorithm in Algorithm:
        allowed = VALID[collective.wire].get(algorithm.wire, "")
        for protocol in Protocol:
            reason = invalid_reason(Config(algorithm, protocol), collective)
            assert (reason is None) == (LETTER[protocol] in allowed), (algorithm, protocol, reason)
        # With the protocol left to NCCL, an algorithm is valid when any protocol is.
        assert (invalid_reason(Config(algorithm), collective) is None) == bool(allowed)


@pytest.mark.parametrize(
    ("config", "collective", "where", "reason"),
    [
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
    ],
)
def test_reason_says_what_does_not_fit(
    config: Config, collective: Collective, where: dict[str, Any], reason: str | None
) -> None:
    if "version" in where:
        where = {**where, "version": NcclVersion(*where["version"])}
    found = invalid_reason(config, collective, **where)
    assert found is None if reason is None else str(found).startswith(reason)


def test_config_names_are_unique() -> None:
    configs = [
        Config(a, p, n, b)
        for a in (None, *Algorithm)
        for p in (None, *Protocol)
        for n in (None, 1, 16)
        for b in (None, 4096)
    ]
    assert len({config.key for config in configs}) == len(configs)


def test_models_are_counted_and_sorted() -> None:
    node = node_part(["B", "A", "B"], mig=True, nic_kind="socket", num_nics=1)
    assert node == "gpu=A*1+B*2;mig=1;nic=socket*1"
    assert check_fingerprint(with_nccl(node, NcclVersion(2, 28, 9))).endswith(";nccl=22809")


@pytest.mark.parametrize("text", [H100, "gpu=none*0;mig=0;nic=none*0;nccl=0"])
def test_fingerprint_is_taken_as_it_is(text: str) -> None:
    assert check_fingerprint(text) == text


@pytest.mark.parametrize(
    "text",
    [
        "",
        "H100",
        H100.replace(";", "\t"),
        H100 + "\n",
        H100.replace("mig=0", "mig=2"),
        H100.replace("*8;mig", ";mig"),
        H100.replace("22809", "2.28.9"),
        H100.replace("NVIDIA", "N" * 160),
        H100.replace("NVIDIA", "\x07"),
    ],
)
def test_anything_else_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(UserError, match="one looks like 'gpu=NVIDIA H100"):
        check_fingerprint(text)
