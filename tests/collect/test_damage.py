"""Files that are damaged, cut off, of another kind, or put together at random."""

import gzip
import json
import random
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from dynamiccl.collect.imports import ImportOptions, import_files
from dynamiccl.errors import DynamicclError
from tests.collect.calls.test_import import entry_bytes, header_bytes, record
from tests.collect.traces.made import Chrome, inspector_line
from tests.collect.traces.test_traces import dump_of_4_3
from tests.published import folder, published

DATA = Path(__file__).parents[1] / "data"
#: The largest log has 70 KB; the damage is looked for in the last part of it.
LIMIT = 12_000
LOG = b"# nThread 1 nGpus 8\n8 2 float sum -1 9.0 0.00 0.00 0 9.0 0.00 0.00 0\n"


def kineto(path: Path) -> bytes:
    chrome = Chrome()
    chrome.step(1, 0.0, 900.0)
    for number in range(3):
        chrome.compute(100.0 * number, 60.0)
        chrome.collective(100.0 * number + 50, 30.0)
    return chrome.write(path / "sound").read_bytes()


def lines_of(*documents: object) -> bytes:
    return "".join(f"{json.dumps(each)}\n" for each in documents).encode()


#: A sound file of each kind that is read.
SOUND: dict[str, Callable[[Path], bytes]] = {
    **{
        path.name: lambda _, path=path: path.read_bytes()[-LIMIT:]  # type: ignore[misc]
        for path in sorted(folder("logs").glob("*.log"))[::4]
    },
    "v3.json": lambda _: (DATA / "nccl_tests_v3.json").read_bytes(),
    "sweep.csv": lambda _: b"collective,size_bytes,num_ranks,time_us\nallreduce,1024,4,9\n" * 9,
    "kineto": kineto,
    "kineto.gz": lambda path: gzip.compress(kineto(path), mtime=0),
    "inspector": lambda _: lines_of(*(inspector_line(0, n, 5.0) for n in range(3))),
    "inspector-4.3": lambda _: lines_of(*dump_of_4_3(4, announced=4)),
    "calls.dcc": lambda _: header_bytes() + b"".join(entry_bytes(record(i, 0)) for i in range(9)),
}
#: What stands where a file has a number, a name, or a record.
ODD = ("null", "-1", "1e400", '"x"', "[]", "{}", "true", "99999999999999999999", "nan", "1_0", "٣")


def cut(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.randrange(len(data))]


def flipped(draw: random.Random, data: bytes) -> bytes:
    found = bytearray(data)
    for _ in range(draw.randint(1, 20)):
        found[draw.randrange(len(data))] = draw.randrange(256)
    return bytes(found)


def shuffled(draw: random.Random, data: bytes) -> bytes:
    lines = data.splitlines(keepends=True)
    draw.shuffle(lines)
    return b"".join(lines)


def odd(draw: random.Random, data: bytes) -> bytes:
    """One value is of another type, or no value."""
    text = data.decode("utf-8", "replace")
    ends = [at for at, char in enumerate(text) if char in ",}]\n "] or [0]
    end = draw.choice(ends)
    begin = max(text.rfind(char, 0, end) for char in ':,{[ "\n') + 1
    return (text[:begin] + draw.choice(ODD) + text[end:]).encode()


def noise(draw: random.Random, data: bytes) -> bytes:
    return data[: draw.choice([0, 8, 20])] + draw.randbytes(draw.randrange(400))


def refusal_of(path: Path, out: Path) -> DynamicclError | None:
    """What the import of a file says where nothing of it is taken."""
    try:
        import_files([path], out, options=ImportOptions(system="s"))
    except DynamicclError as error:
        return error
    return None


@pytest.mark.parametrize("damage", [cut, flipped, shuffled, odd, noise])
@pytest.mark.parametrize("name", SOUND)
def test_damage_gives_rows_or_one_line_that_names_the_file(
    name: str, damage: Callable[[random.Random, bytes], bytes], tmp_path: Path
) -> None:
    data = SOUND[name](tmp_path)
    path = tmp_path / name
    for seed in range(5):
        path.write_bytes(damage(random.Random(f"{seed} {name}"), data))
        if refused := refusal_of(path, tmp_path / f"out-{seed}"):
            assert (refused.exit_code, "\n" in str(refused)) == (3, False), seed
            assert name in str(refused), seed


#: More, as a command's line: tests/cli/bad_input.toml.
def test_a_refusal_names_file_and_reason(tmp_path: Path) -> None:
    for content, why in (
        (b"PK\x03\x04....", "is a zip archive or a spreadsheet, which is not read; unpack it"),
        (b"\x28\xb5\x2f\xfd....", r"is packed by zstd, which is not read; unpack it \(zstd -d\)"),
        (b"<!doctype html><p>", "is a web page, which is not read; save the raw text"),
        (bytes(range(256)) * 4, "is no text; give an output of nccl-tests"),
        (gzip.compress(LOG, mtime=0)[:-30], "is damaged: .*; copy it again"),
        (b"msg,coll,ms\n8,allreduce,1\n", r"no column size_bytes.*with --columns size_bytes=NAME"),
        (b"collective,size_bytes,time_us\n", "holds no usable row: it has none"),
        (b"collective,size(MB),time_us\nreduce,1,9\n", r"unknown or repeated column size\(MB\)"),
        (b'{"nccl_version":"2.28.3","communicators_count":1}', "is a report of NCCL's RAS"),
        (b'{"comm_lib_version":"2","pg_status":{}}', "is PyTorch's Flight Recorder"),
        (b"Time (%),Avg (ns),Name\n9,5,k\n", "is a table of Nsight Systems: kernels without"),
        (b'{"args":' + b"[" * 200_000, "x"),
        (header_bytes()[:200], "ends at byte 200, within its header"),
        (header_bytes()[:-1] + b"?", "the checksum of its header is wrong"),
        (header_bytes(version=2), "version 2"),
        (header_bytes(entry_bytes=96), "entries of 96 bytes"),
    ):
        path = tmp_path / ("x.dcc" if content[:2] == b"DC" else "x")
        path.write_bytes(content)
        refused = refusal_of(path, tmp_path / "out")
        assert refused is not None
        assert (refused.exit_code, "\n" in str(refused)) == (3, False)
        assert re.search(why, str(refused))
        assert str(path) in str(refused)


#: Published logs without a row: what is said of them.
WITHOUT_ROWS = {
    "a10g_pat_ll128_invalid.log": ":14: no benchmark row; the run failed: Error : no algorithm",
    "ebpf_nccl_failure_internal.log": ":3: no benchmark row; .* 'internal error'",
    "ebpf_nccl_failure_only.log": ":2: no benchmark row; .* common.cu:210 'invalid usage'",
    # A table of a torch script, in markdown and with units: not nccl-tests, and not read as it.
    "ml_engineering_h200_torch_bench_table.log": "no row of nccl-tests",
}


@pytest.mark.parametrize("name", WITHOUT_ROWS)
def test_a_log_without_a_row_says_why(name: str, tmp_path: Path) -> None:
    refused = refusal_of(published(folder("logs") / name), tmp_path)
    assert refused is not None
    assert refused.exit_code == 3
    assert re.search(f"{re.escape(name)}.*{WITHOUT_ROWS[name]}", str(refused))
