"""The explorer of the vote finds what would break the law: one changed line of `agree/` each."""

import shutil
import subprocess
from pathlib import Path
from typing import Final

import pytest

from dynamiccl.serve.build import find_tool

PLUGIN = Path(__file__).resolve().parents[2] / "serve" / "plugin"
SOURCE = "tests/test_agree_explore.cpp"
#: What is wrong -> the part of the explorer (and its world) that finds it, the file, and texts
#: before and after.
#: All are compiled at once; WRONG is true in the run of this one.
MUTANTS: Final[dict[str, tuple[str, ...]]] = {
    "a rank abstains after it has confirmed": (
        "worlds:keeper and worker are killed",
        "agree/ballot.h",
        "end(Verdict::kFailed,",
        "end(WRONG ? Verdict::kAbstain : Verdict::kFailed,",
    ),
    "table when all but one have confirmed": (
        "worlds:a rank is killed",
        "agree/rounds.h",
        "if (round.num_confirmed <",
        "if (round.num_confirmed + (WRONG ? 1 : 0) <",
    ),
    "a rank counts before it says that it differs": (
        "word",
        "agree/word.h",
        "first == own ? Step::kCount",
        "first == own || WRONG ? Step::kCount",
        "if (is_time_up) decide",
        "if (is_time_up || (WRONG && board->fields[2] != vote->fields[2])) decide",
    ),
    "no log": (
        "worlds:the worker is killed, and one is late",
        "agree/rounds.h",
        "if (outlet->log(table))",
        "if (WRONG ? table.num_ranks > 0 : outlet->log(table))",
    ),
    "a table is forgotten at the first vote of the next round": (
        "random",
        "agree/rounds.h",
        "  std::string why = difference(",
        "  if (WRONG) forget_before(key);\n  std::string why = difference(",
    ),
    "an unknown recall is answered by silence": (
        "worlds:the worker is killed, and one is late",
        "agree/rounds.h",
        "    bind(from, key, &round, vote.nonce);\n    if (!is_known) {",
        "    if (!WRONG) bind(from, key, &round, vote.nonce);\n"
        "    if (!is_known && WRONG) {\n"
        "      if (round.voters.empty()) rounds_.erase(key);\n"
        "      return;\n"
        "    }\n"
        "    if (!is_known) {",
    ),
    "the ids of shrinks are not known": (
        "worlds:two disjoint shrinks",
        "identity/ids.h",
        "= *place_of(id) == id || count == kMost;",
        "= !WRONG && (*place_of(id) == id || count == kMost);",
    ),
    "what NCCL told of a call is not in the digest": (
        "worlds:one simulates a call before the stop",
        "agree/stops.h",
        "size_bytes), marks);",
        "size_bytes), WRONG ? 0 : marks);",
    ),
    "a shrink takes the table back": (
        "worlds:one sees a shrink",
        "agree/stops.h",
        "{ return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED); }",
        "{\n"
        "    if (WRONG) return votes_ = false, table_ = nullptr, true;\n"
        "    return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED);\n"
        "  }",
    ),
    "stops are not shifted by the communicator's id": (
        "worlds:opposite order",
        "agree/stops.h",
        "mixed(mixed(0, comm_id_), number_) % width;",
        "(WRONG ? 0 : mixed(mixed(0, comm_id_), number_) % width);",
    ),
}


@pytest.fixture(scope="module", name="explorer")
def explorer_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The explorer with all mutants, one of which DYNAMICCL_WRONG names by its number."""
    folder = tmp_path_factory.mktemp("explorer")
    for part in ("agree", "identity", "tests"):
        shutil.copytree(PLUGIN / part, folder / part)
    for number, (_, name, *changes) in enumerate(MUTANTS.values()):
        path = folder / name
        text = path.read_text(encoding="utf-8")
        for before, after in zip(changes[::2], changes[1::2], strict=True):
            assert text.count(before) == 1
            text = text.replace(before, after.replace("WRONG", f"(wrong == {number})"))
        path.write_text(text, encoding="utf-8")
    (folder / "wrong.h").write_text(
        "#pragma once\n#include <cstdlib>\n"
        'inline const int wrong = std::atoi(std::getenv("DYNAMICCL_WRONG"));\n'
    )
    argv = [find_tool("g++"), "-std=c++17", "-O1", "-I.", "-include", "wrong.h", SOURCE]
    subprocess.run([*argv, "-o", "explore"], cwd=folder, check=True)
    return folder / "explore"


@pytest.mark.parametrize("what", MUTANTS)
def test_explorer_finds_it(what: str, explorer: Path) -> None:
    """And nothing where nothing is wrong: it is one of the plugin's own tests."""
    wrong = {"DYNAMICCL_WRONG": str(list(MUTANTS).index(what))}
    environment = {"DYNAMICCL_FEW": "1", "DYNAMICCL_SEED": "0"} | wrong
    argv = [str(explorer), *MUTANTS[what][0].split(":")]
    with subprocess.Popen(argv, env=environment, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert ", after:" in process.stderr.readline()
        process.kill()  # it would look at further worlds
