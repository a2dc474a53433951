"""A vendor's tuner behind ours: asked first on every call, and overridden only where a table acts.

Each test has copies of both libraries: a vendor is looked for once a process.
"""

import ctypes
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dynamiccl.errors import PluginError
from dynamiccl.libraries import VENDOR_NAME
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.serve.table import DecisionTable
from tests.serve.abi import Communicator, TunerPlugin, loopback_environment, write_bare_artifact

OURS = Config(Algorithm.Ring, Protocol.Simple, 8)
#: A vendor's library, NCCL's ABI, and the vendor's struct that is asked then.
ASKED = [
    *[("v3", version, 3) for version in (4, 5, 6)],  # as AWS's aws-ofi-nccl has it
    *[("v4", version, 4) for version in (4, 5, 6)],
    ("v6", 6, 6),
    ("v6", 5, 4),  # v6 is too new for it
]
RANKS = 2


class Counts(ctypes.Structure):
    """`WilfulCounts` in serve/plugin/tests/wilful_plugin.cpp."""

    _fields_ = (
        *((name, ctypes.c_int) for name in ("inits", "calls", "finalized")),
        *((name, ctypes.c_int) for name in ("version", "reg_buff")),
        ("comm_id", ctypes.c_uint64),
        ("constants", ctypes.c_void_p),
    )


class Behind:
    """Ours with a vendor's tuner behind it."""

    def __init__(self, build: Path, folder: Path, vendor: str | None) -> None:
        self.counts: Any = None
        artifact = folder / "artifact"
        all_reduce = [[OURS if row == Collective.AllReduce else None] * 249 for row in range(5)]
        table = DecisionTable.from_configs(all_reduce, num_nodes=1, num_ranks=RANKS)
        write_bare_artifact(artifact, "box", table)
        self.environment = loopback_environment(artifact, "box")
        self.plugin = TunerPlugin(Path(shutil.copy(build / VENDOR_NAME, folder / VENDOR_NAME)))
        if vendor is not None:
            path = shutil.copy(build / f"libwilful_{vendor}.so", folder / "libvendor.so")
            self.environment["DYNAMICCL_NEXT_TUNER"] = str(path)
            self.counts = Counts.in_dll(ctypes.CDLL(str(path)), "wilful_counts")

    def communicator(self, version: int, **environment: str | None) -> Any:
        return self.plugin.communicator(
            RANKS, 1, version=version, environment=self.environment | environment, all_ranks=True
        )


@pytest.fixture(name="behind")
def behind_fixture(plugin_path: Path, tmp_path: Path) -> Callable[[str | None], Behind]:
    return lambda vendor: Behind(plugin_path.parent, tmp_path, vendor)


def taken(
    communicator: Communicator,
    collective: Collective = Collective.AllReduce,
    *,
    num_pipe_ops: int = 1,
    missing: Sequence[int] = (),
) -> tuple[int, int]:
    """The cell that NCCL takes then, and the channels."""
    costs = np.full((7, 3), 10, dtype=np.float32)
    costs.flat[list(missing)] = -1
    found = communicator.ask(collective, 1 << 20, costs, num_pipe_ops=num_pipe_ops, reg_buff=1)
    assert found.algorithm is not None
    assert found.protocol is not None
    return 3 * found.algorithm + found.protocol, found.num_channels


@pytest.mark.parametrize(("vendor", "version", "theirs"), ASKED)
def test_ours_decides_where_it_acts_and_theirs_elsewhere(
    vendor: str,
    version: int,
    theirs: int,
    behind: Callable[[str | None], Behind],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    both = behind(vendor)
    monkeypatch.setenv("WILFUL_CELL", "1")
    with both.communicator(version) as asked:
        assert (both.counts.version, both.counts.inits) == (theirs, RANKS)
        if theirs >= 5:
            assert both.counts.comm_id
            assert both.counts.constants
        # Ring/Simple is ours; theirs, before it, is not to win the tie nor to relegate Ring.
        assert taken(asked) == (5, 8)
        assert both.counts.reg_buff == (1 if theirs > 3 else -1)
        assert taken(asked, Collective.AllGather) == (1, 3)  # our table leaves it
        monkeypatch.setenv("WILFUL_CELL", "20")
        assert taken(asked) == (5, 8)
        assert taken(asked, num_pipe_ops=0) == (20, 3)  # about symmetric kernels
        assert taken(asked, missing=[5]) == (20, 3)  # ours cannot be had
        monkeypatch.setenv("WILFUL_CELL", "-1")
        assert taken(asked) == (5, 8)
        assert taken(asked, Collective.AllGather) == (0, 0)
        monkeypatch.setenv("WILFUL_ERROR_AT", "7")
        with pytest.raises(PluginError, match="returned 5"):
            taken(asked)
        assert both.counts.calls == 8
        assert both.counts.finalized == 0
    assert both.counts.finalized == RANKS


@pytest.mark.parametrize("version", [4, 6])
def test_theirs_alone_where_ours_is_switched_off(
    version: int, behind: Callable[[str | None], Behind], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = behind("v4")
    monkeypatch.setenv("WILFUL_CELL", "20")
    with both.communicator(version, DYNAMICCL_DISABLE="1") as asked:
        assert taken(asked) == (20, 3)
    monkeypatch.setenv("WILFUL_INIT_ERROR", "1")
    with pytest.raises(PluginError, match="init returned 5"), both.communicator(version):
        pass
    assert (both.counts.inits, both.counts.finalized) == (RANKS, RANKS)


def test_chunk_sizes_are_theirs(
    behind: Callable[[str | None], Behind], monkeypatch: pytest.MonkeyPatch
) -> None:
    both = behind("v6")
    monkeypatch.setenv("WILFUL_CHUNK", "4096")
    with both.communicator(6) as asked:
        taken(asked)
        cell = (Algorithm.Ring, Protocol.Simple)
        assert asked.chunk_bytes(cell, 1 << 19, Collective.AllReduce) == 4096


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("/nowhere/libvendor.so", "(/nowhere/libvendor.so): goes on without it: /nowhere/"),
        ("nobody", "(nobody): goes on without it: libnccl-tuner-nobody.so: "),
        ("libnobody.so", "(libnobody.so): goes on without it: libnobody.so: "),
        ("none", None),
        ("itself", "goes on without it: that is this plugin itself"),
        ("libc.so.6", "goes on without it: it exports no tuner of v3 to v6 that this NCCL takes"),
    ],
)
def test_without_a_vendor_ours_goes_on_and_says_so_once(
    named: str, said: str | None, behind: Callable[[str | None], Behind]
) -> None:
    both = behind(None)
    name = str(both.plugin.path) if named == "itself" else named
    lines: list[str] = []
    for _ in range(2):  # one rank alone, to have all lines
        alone = both.environment | {"DYNAMICCL_NEXT_TUNER": name, "DYNAMICCL_DISABLE": "1"}
        with both.plugin.communicator(RANKS, 1, version=6, environment=alone) as asked:
            lines += [line for line in asked.lines if "DYNAMICCL_NEXT_TUNER" in line]
    assert len(lines) == (said is not None)
    assert all(str(said) in line for line in lines)
    with both.communicator(6, DYNAMICCL_NEXT_TUNER=name) as asked:
        assert taken(asked) == (5, 8)
