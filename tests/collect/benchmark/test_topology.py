from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.collect.benchmark.topology import keep_dumps, topology_features
from dynamiccl.collect.grid import LaunchProfile, Setting
from dynamiccl.datasets.schema import MEASUREMENTS
from dynamiccl.nccl import Collective
from tests.fakes.nccl_tests.topology import graph_xml, topology_xml
from tests.published import folder

#: Dumps of real machines and files that cloud vendors give their users.
REAL = folder("topologies")

OCI = {
    "compute_capability": 9.0,
    "nvlinks_per_gpu": 18,
    "nvlink_generation": 4,
    "nvswitch": True,
    "nics_per_node": 16,
    "cpu_vendor": "intel",
}
AZURE_NCV4 = {
    "compute_capability": 8.0,
    "nvlinks_per_gpu": 12,
    "nvlink_generation": 3,
    "nvswitch": False,
    "nic_gbits_per_s": 100.0,
    "nics_per_node": 1,
    "nic_kind": "socket",
    "cpu_vendor": "amd",
}


@pytest.mark.parametrize(
    ("name", "features"),
    [
        ("oci_H100-topology.xml", {**OCI, "nic_gbits_per_s": 180.0}),
        ("oci_H100-topology-kubernetes.xml", {**OCI, "nic_gbits_per_s": 200.0}),
        ("azure_ncv4-topo.xml", AZURE_NCV4),
        ("azurehpc_nc48v4-topo.xml", AZURE_NCV4),
        # What a vendor prepares names CPUs and slots; NCCL fills in GPUs and networks.
        ("aws_p4d-24xl-topo.xml", {"cpu_vendor": "intel"}),
        ("azure_ndv4-topo.xml", {"cpu_vendor": "amd"}),
        ("aws_g5.48xl-topo.xml", {}),
        # The other dump: of graphs.
        ("azure_ncv4-graph.xml", {}),
    ],
)
def test_features_of_real_machines(name: str, features: dict[str, Any]) -> None:
    assert topology_features((REAL / name).read_text()) == features


def test_features_of_the_stand_in() -> None:
    assert topology_features(topology_xml()) == {
        **OCI,
        "nics_per_node": 8,
        "nic_gbits_per_s": 400.0,
    }
    assert topology_features(graph_xml(4)) == {}


def test_features_are_columns() -> None:
    names = {field.name for field in MEASUREMENTS}
    assert topology_features(topology_xml()).keys() <= names
    assert AZURE_NCV4.keys() <= names


def node(inside: str, cpu: str = "") -> str:
    return f'<system version="1"><cpu numaid="0" {cpu}>{inside}</cpu></system>'


@pytest.mark.parametrize(
    ("gpu", "features"),
    [
        (
            '<gpu sm="61"/>',
            {"compute_capability": 6.1, "nvlinks_per_gpu": 0, "nvlink_generation": 0},
        ),
        ('<gpu sm="89"/>', {"compute_capability": 8.9, "nvlink_generation": 0}),
        (
            '<gpu sm="100"><nvlink count="18" tclass="0x068000"/></gpu>',
            {"compute_capability": 10.0, "nvlink_generation": 5, "nvswitch": True},
        ),
        (
            '<gpu sm="70"><nvlink count="2" tclass="0x030200"/><nvlink count="1"/></gpu>',
            {"nvlink_generation": 2, "nvlinks_per_gpu": 3, "nvswitch": False},
        ),
    ],
)
def test_gpus(gpu: str, features: dict[str, Any]) -> None:
    assert topology_features(node(gpu)).items() >= features.items()


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["eth0"], "socket"),
        (["enp1s0", "eno2"], "socket"),
        (["efa_0-rdm"], "efa"),
        (["rdmap16s27"], "efa"),
        (["mlx5_0", "mlx5_1"], None),
        (["mlx5_0", "eth0"], None),
        ([""], None),
    ],
)
def test_kind_of_network_by_its_names(names: list[str], kind: str | None) -> None:
    nets = "".join(f'<net name="{name}" speed="100000"/>' for name in names)
    assert topology_features(node(nets)).get("nic_kind") == kind


def test_most_common_speed_counts_and_none_is_unknown() -> None:
    speeds = (400000, 400000, 10000)
    nets = "".join(f'<net name="mlx5_{i}" speed="{s}"/>' for i, s in enumerate(speeds))
    assert topology_features(node(nets))["nic_gbits_per_s"] == 400.0
    for silent in ('<net name="mlx5_0"/>', '<net name="mlx5_0" speed="0"/>'):
        assert topology_features(node(silent)) == {"nics_per_node": 1}


def test_vendor_that_sockets_do_not_agree_on_or_nobody_knows_is_left_out() -> None:
    both = '<system><cpu vendor="GenuineIntel"/><cpu vendor="AuthenticAMD"/></system>'
    assert topology_features(both) == {}
    assert topology_features('<system><cpu vendor="Hygon"/></system>') == {}


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE system [<!ENTITY a0 "xxxxxxxxxx">'
    + "".join(f'<!ENTITY a{i} "{f"&a{i - 1};" * 10}">' for i in range(1, 12))
    + "]><system><cpu>&a11;</cpu></system>"
)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "not xml",
        "<system",
        "<system><cpu></system>",
        '<graphs version="1"/>',
        "\0",
        BOMB,
        '<!DOCTYPE system [<!ENTITY x SYSTEM "file:///etc/passwd">]><system>&x;</system>',
        "<system>" * 5000,
    ],
    ids=range(9),
)
def test_garbage_and_bombs_say_nothing(text: str) -> None:
    assert topology_features(text) == {}


def test_foreign_file_is_not_read_through_an_entity(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text('<gpu sm="90"/>')
    text = f'<!DOCTYPE system [<!ENTITY x SYSTEM "{secret.as_uri()}">]><system>&x;</system>'
    assert "compute_capability" not in topology_features(text)


@given(
    value=st.text(st.characters(exclude_characters='<&"', codec="utf-8", exclude_categories=["Cc"]))
)
@settings(deadline=None, max_examples=60)
def test_attributes_that_are_no_numbers_are_harmless(value: str) -> None:
    text = node(
        f'<gpu sm="{value}"><nvlink count="{value}" tclass="{value}"/></gpu>'
        f'<net name="{value}" speed="{value}"/>',
        cpu=f'vendor="{value}"',
    )
    found = topology_features(text)
    for name, known in found.items():
        assert isinstance(known, int | float | str), name


@given(cut=st.integers(0, len(topology_xml()) - 1))
@settings(deadline=None, max_examples=40)
def test_dump_that_is_cut_off_says_nothing(cut: int) -> None:
    text = topology_xml()[:cut]
    # All that may be missing of a whole one is its last newline.
    assert topology_features(text) == (
        {} if cut < len(topology_xml().rstrip()) else topology_features(topology_xml())
    )


SETTING = Setting(Collective.AllReduce, 2, 8, profile=LaunchProfile("net"))
LOG = [
    "n1:1:1 [0] NCCL INFO TUNER/Plugin: loaded",
    "n1:1:1 [0] NCCL INFO AllReduce: 1024 Bytes -> Algo RING proto LL channel{Lo..Hi}={0..3}",
    "n1:1:1 [0] NCCL INFO  Algorithm |  Tree | Ring |",
]


def test_dumps_are_kept_once_with_the_head_of_the_log(tmp_path: Path) -> None:
    work, out = tmp_path / "work", tmp_path / "out"
    work.mkdir()
    (work / "topology.xml").write_text("first")
    (work / "graph.xml").write_text("graph")
    keep_dumps(out, "box", SETTING, work, LOG)
    place = out / "topology" / "system=box" / "allreduce-2x8-net"
    kept = {path.name: path.read_text() for path in place.iterdir()}
    assert kept == {
        "topology.xml": "first",
        "graph.xml": "graph",
        "nccl.log": f"{LOG[0]}\n{LOG[2]}\n",
    }
    (work / "topology.xml").write_text("second")
    keep_dumps(out, "box", SETTING, work, LOG)
    assert (place / "topology.xml").read_text() == "first"
    assert [path.name for path in place.parent.iterdir()] == [place.name]


def test_launch_without_dumps_keeps_its_log(tmp_path: Path) -> None:
    keep_dumps(tmp_path / "out", "box", SETTING, tmp_path, LOG[:1])
    [log] = (tmp_path / "out").rglob("*.*")
    assert (log.name, log.read_text()) == ("nccl.log", f"{LOG[0]}\n")


def test_launch_that_failed_at_once_leaves_the_place_to_the_next_one(tmp_path: Path) -> None:
    keep_dumps(tmp_path / "out", "box", SETTING, tmp_path, [])
    assert not (tmp_path / "out").exists()


def test_what_a_crash_left_half_written_is_written_anew(tmp_path: Path) -> None:
    place = tmp_path / "out" / "topology" / "system=box" / "allreduce-2x8-net"
    hidden = place.with_name(f".writing-{place.name}")
    hidden.mkdir(parents=True)
    (hidden / "topology.xml").write_text("half")
    keep_dumps(tmp_path / "out", "box", SETTING, tmp_path, LOG)
    assert [path.name for path in place.iterdir()] == ["nccl.log"]
    assert not hidden.exists()
