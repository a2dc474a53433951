"""Dumps of PyTorch's Flight Recorder, and pickles that would do something else than hold them."""

import copyreg
import io
import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dynamiccl.collect.importing.importer import ImportOptions, import_files
from dynamiccl.collect.traces.unpickler import loads_plain
from dynamiccl.errors import CorruptFile
from tests.collect.traces.made import calls_of, read, recorder_dump, recorder_entry


def as_pickle(path: Path, dump: Any) -> Path:
    path.write_bytes(pickle.dumps(dump, protocol=2))
    return path


def as_json(path: Path, dump: Any) -> Path:
    path.write_text(json.dumps(dump))
    return path


WRITERS = pytest.mark.parametrize("write", [as_pickle, as_json])
Writer = Callable[[Path, Any], Path]


@WRITERS
def test_ranks_are_joined_by_the_groups_number(write: Writer, tmp_path: Path) -> None:
    paths = [
        write(
            tmp_path / f"nccl_trace_rank_{rank}",
            recorder_dump(*(recorder_entry(n, duration_ms=0.25 + rank) for n in range(1, 4))),
        )
        for rank in (0, 1)
    ]
    calls = calls_of(*paths)
    told = ("source", "collective", "size_bytes", "datatype", "num_ranks", "group_ranks")
    assert calls.select(told).row(0) == (
        *("flight-recorder", "AllReduce", 2000, "bfloat16", 2),
        [0, 1],
    )
    assert calls["time_us"].to_list() == [250.0] * 3
    assert calls["group_sequence"].to_list() == [1, 2, 3]
    # A dump knows no kernel: a symmetric one would not have asked.
    assert calls["asks_tuner"].to_list() == [None] * 3


@WRITERS
@pytest.mark.parametrize("state", ["started", "scheduled"])
def test_what_did_not_complete_has_no_time(state: str, write: Writer, tmp_path: Path) -> None:
    dump = recorder_dump(recorder_entry(1, state=state))
    [call] = calls_of(write(tmp_path / "rank_0", dump)).to_dicts()
    assert (call["time_at_most_us"], call["ranks_timed"]) == (None, 0)


@WRITERS
def test_when_the_watchdog_looked_is_no_time(write: Writer, tmp_path: Path) -> None:
    entry = recorder_entry(1)
    entry.pop("duration_ms")
    [call] = calls_of(write(tmp_path / "rank_0", recorder_dump(entry))).to_dicts()
    assert call["time_at_most_us"] is None
    assert call["timestamp"].year == 2023


def test_messages_between_two_ranks_are_no_call_of_all(tmp_path: Path) -> None:
    sent = recorder_entry(1, profiling_name="nccl:send 0->1", is_p2p=True, collective_seq_id=0)
    paths = [as_json(tmp_path / f"rank_{rank}.json", recorder_dump(sent)) for rank in (0, 1)]
    calls = calls_of(*paths)
    assert calls["collective"].to_list() == ["SendRecv", "SendRecv"]
    assert calls["asks_tuner"].to_list() == [False, False]


def test_calls_that_share_a_number_are_told_apart_by_their_order(tmp_path: Path) -> None:
    told: dict[str, Any] = {"collective_seq_id": 5}
    entries = [recorder_entry(n, input_sizes=[[n]], **told) for n in (1, 2)]
    paths = [as_json(tmp_path / f"rank_{rank}", recorder_dump(*entries)) for rank in (0, 1)]
    assert calls_of(*paths)["size_bytes"].to_list() == [2, 4]


def test_dumps_of_older_releases_name_nccls_release_otherwise(tmp_path: Path) -> None:
    dump = recorder_dump(recorder_entry(1))
    dump["nccl_version"] = dump.pop("comm_lib_version")
    assert calls_of(as_json(tmp_path / "rank_0", dump))["nccl_version"].to_list() == ["2.27.5"]


def test_a_dump_whose_name_has_no_rank_is_not_joined(tmp_path: Path) -> None:
    paths = [
        as_json(tmp_path / name, recorder_dump(recorder_entry(1))) for name in ("a", "b_20240101")
    ]
    found = read(*paths)
    assert found.calls["time_us"].to_pylist() == [None, None]
    assert "whose dump it is" in found.reports[0].remarks[0]


def test_calls_of_another_backend_ask_no_tuner(tmp_path: Path) -> None:
    dump = recorder_dump(recorder_entry(1, profiling_name="gloo:all_reduce"))
    assert calls_of(as_json(tmp_path / "rank_0", dump))["asks_tuner"].to_list() == [False]


class _Reduces:
    """Pickles as a call of os.system."""

    def __init__(self, command: str) -> None:
        self._command = command

    def __reduce__(self) -> tuple[Any, tuple[str]]:
        return os.system, (self._command,)


def attacks(mark: Path) -> dict[str, bytes]:
    """Pickles that would run a command, by the instruction that they do it with."""
    command = f"touch {mark}"
    raw = command.encode()
    text = b"X" + struct.pack("<I", len(raw)) + raw
    copyreg.add_extension("os", "system", 240)
    try:
        extension = b"\x80\x02\x82\xf0" + text + b"\x85R."
        code = pickle.loads(b"\x80\x02\x82\xf0.")
    finally:
        copyreg.remove_extension("os", "system", 240)
    assert code is os.system
    hidden = io.BytesIO()
    pickle.Pickler(hidden, protocol=4).dump(recorder_dump(recorder_entry(1), _Reduces(command)))  # type: ignore[arg-type]
    return {
        "GLOBAL": b"\x80\x02cos\nsystem\n" + text + b"\x85R.",
        "STACK_GLOBAL": b"\x80\x04\x8c\x02os\x8c\x06system\x93" + text + b"\x85R.",
        "REDUCE": pickle.dumps(_Reduces(command), protocol=2),
        "INST": b"\x80\x02(" + text + b"ios\nsystem\n.",
        "OBJ": b"\x80\x02(cos\nsystem\n" + text + b"o.",
        "EXT1": extension,
        "PERSID": b"\x80\x02Pos.system\n.",
        "BINPERSID": b"\x80\x02" + text + b"Q.",
        "in an entry": hidden.getvalue(),
    }


@pytest.mark.parametrize("kind", sorted(attacks(Path("x"))))
def test_a_pickle_that_would_run_a_command_is_refused_and_runs_nothing(
    kind: str, tmp_path: Path
) -> None:
    mark = tmp_path / "was-run"
    path = tmp_path / "nccl_trace_rank_0"
    path.write_bytes(attacks(mark)[kind])
    with pytest.raises(CorruptFile, match="which can run code") as caught:
        import_files([path], tmp_path / "out", options=ImportOptions(system="s"))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not mark.exists()
    # The same bytes would have run it: the attack is a real one.
    if kind in {"GLOBAL", "STACK_GLOBAL", "REDUCE", "INST", "OBJ", "in an entry"}:
        pickle.loads(path.read_bytes())
        assert mark.exists()


def test_the_second_lock_holds_without_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pickletools.genops", lambda _: [])
    with pytest.raises(CorruptFile, match=r"names (os|posix)\.system"):
        loads_plain(pickle.dumps(_Reduces("true"), protocol=2), where="x")


@pytest.mark.parametrize("cut", [0.2, 0.5, 0.99])
@WRITERS
def test_a_dump_that_is_cut_off_is_named(write: Writer, cut: float, tmp_path: Path) -> None:
    path = write(tmp_path / "rank_0", recorder_dump(*(recorder_entry(n) for n in range(20))))
    path.write_bytes(path.read_bytes()[: int(path.stat().st_size * cut)])
    with pytest.raises(CorruptFile, match="rank_0 is no whole"):
        read(path)


def test_plain_values_come_back_as_they_were() -> None:
    value = {"a": [1, -(2**70), 2.5, None, True, ("x", "y")], "é": {}}
    for protocol in range(2, 6):
        assert loads_plain(pickle.dumps(value, protocol=protocol), where="x") == value
