"""Tuning constants: the file, the command, and the artifact that holds them."""

import json
from pathlib import Path

import numpy as np
import pytest

from dynamiccl.errors import CorruptFile, UserError
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.constants import FIELDS, NUM_CONSTANTS, TuningConstants, read_json
from dynamiccl.serve.plugin_index import PluginIndex
from tests.cli.conftest import Shell

RING_LL = {"baseLatencies": [[None] * 3, [16.5, None, None], *[[None] * 3] * 5]}


def made(values: object = None) -> TuningConstants:
    given = np.zeros(NUM_CONSTANTS) if values is None else np.asarray(values)
    return TuningConstants(num_nodes=2, num_ranks=16, values=given)


def test_there_are_as_many_as_nccl_has() -> None:
    assert NUM_CONSTANTS == 144


def test_what_is_written_is_read() -> None:
    constants = made(np.arange(NUM_CONSTANTS, dtype=np.float64))
    again = TuningConstants.from_bytes(constants.to_bytes(), where="x")
    assert (again.num_nodes, again.num_ranks) == (2, 16)
    assert (again.values == constants.values).all()
    shape = {"num_nodes": 2, "num_ranks": 16}
    assert (TuningConstants.from_json(again.to_json(), **shape).values == constants.values).all()


def test_a_missing_name_or_number_stays_nccls_own() -> None:
    constants = TuningConstants.from_json(RING_LL, num_nodes=1, num_ranks=8)
    assert constants.values[3] == 16.5
    assert np.count_nonzero(constants.values) == 1
    shown = constants.to_json()
    assert shown["baseLatencies"][1] == [16.5, None, None]
    assert shown.keys() == FIELDS.keys()


def test_every_changed_byte_is_found() -> None:
    data = made().to_bytes()
    for i in range(len(data)):
        changed = bytearray(data)
        changed[i] ^= 1
        with pytest.raises(CorruptFile, match="x holds no usable tuning constants"):
            TuningConstants.from_bytes(bytes(changed), where="x")
    with pytest.raises(CorruptFile):
        TuningConstants.from_bytes(data[:-1], where="x")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"baseLatency": []}, "no tuning constants 'baseLatency'; choose from baseLatencies, hw"),
        ({"baseLatencies": [[1.0]]}, r"baseLatencies has shape \(1, 1\), not \(7, 3\)"),
        ({"llMaxBws": [[1, 2, 3]] * 3 + [[1, 2]]}, "llMaxBws is not made of numbers"),
        ({"llMaxBws": [[-1, 2, 3]] * 4}, "llMaxBws holds -1"),
        ({"llMaxBws": [[1e13, 2, 3]] * 4}, "llMaxBws holds 1e"),
        ({"llMaxBws": "fast"}, "llMaxBws is not made of numbers"),
    ],
)
def test_a_mistake_names_the_field(data: dict[str, object], said: str, tmp_path: Path) -> None:
    path = tmp_path / "constants.json"
    path.write_text(json.dumps(data))
    with pytest.raises(UserError, match=said):
        read_json(path, num_nodes=1, num_ranks=8)


def test_the_command_sets_shows_and_removes_them(
    artifact: Path, shell: Shell, tmp_path: Path
) -> None:
    (tmp_path / "constants.json").write_text(json.dumps(RING_LL))
    info = open_artifact(artifact).tables[0]
    shape = ("--ranks", info.num_ranks, "--nodes", info.num_nodes)
    command = ("dynamiccl-deploy", "constants", artifact, *shape)
    assert "no tuning constants" in shell(*command).err
    before = PluginIndex.read(artifact)
    done = shell(*command, "--from", tmp_path / "constants.json")
    assert (done.code, "1 tuning constants" in done.out) == (0, True)
    opened = open_artifact(artifact)
    assert list(opened.index.constants) == [(info.system, info.num_nodes, info.num_ranks)]
    assert opened.index.systems == before.systems
    assert shell(*command).json["baseLatencies"][1] == [16.5, None, None]
    assert shell(*command, "--remove").code == 0
    assert PluginIndex.read(artifact) == before
