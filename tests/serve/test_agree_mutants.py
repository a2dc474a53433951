"""The explorer of the vote finds what would break the law: one changed line of `agree/` each."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dynamiccl.serve.build import find_tool

PLUGIN = Path(__file__).resolve().parents[2] / "serve" / "plugin"
SOURCE = "tests/test_agree_explore.cpp"
#: What is wrong -> the part of the explorer that finds it, the file, and texts before and after.
#: All are compiled at once; WRONG is true in the run of this one.
MUTANTS = {
    "a rank abstains after it has confirmed": (
        *("worlds", "agree/ballot.h"),
        [("end(Verdict::kFailed,", "end(WRONG ? Verdict::kAbstain : Verdict::kFailed,")],
    ),
    "table when all but one have confirmed": (
        *("worlds", "agree/rounds.h"),
        [("if (round.num_confirmed <", "if (round.num_confirmed + (WRONG ? 1 : 0) <")],
    ),
    "a rank counts before it says that it differs": (
        *("word", "agree/word.h"),
        [
            ("first == own ? Step::kCount", "first == own || WRONG ? Step::kCount"),
            (
                "if (is_time_up) decide",
                "if (is_time_up || (WRONG && board->fields[2] != vote->fields[2])) decide",
            ),
        ],
    ),
    "no log": (
        *("worlds", "agree/rounds.h"),
        [("if (outlet->log(table))", "if (WRONG ? table.num_ranks > 0 : outlet->log(table))")],
    ),
    "a table that could not be logged": (
        *("worlds", "agree/rounds.h"),
        [("outlet->log(table))", "outlet->log(table) || WRONG)")],
    ),
    "a table is forgotten at the first vote of the next round": (
        *("random", "agree/rounds.h"),
        [
            (
                "  std::string why = difference(",
                "  if (WRONG) forget_before(key);\n  std::string why = difference(",
            )
        ],
    ),
    "an unknown recall is answered by silence": (
        *("worlds", "agree/rounds.h"),
        [
            (
                "    bind(from, key, &round, vote.nonce);\n    if (!is_known) {",
                "    if (!WRONG) bind(from, key, &round, vote.nonce);\n"
                "    if (!is_known && WRONG) {\n"
                "      if (round.voters.empty()) rounds_.erase(key);\n"
                "      return;\n"
                "    }\n"
                "    if (!is_known) {",
            )
        ],
    ),
    "a stranger's answer counts": (
        *("worlds", "agree/ballot.h"),
        [
            (
                "heard.kind == ReplyKind::kStranger ||",
                "(!WRONG && heard.kind == ReplyKind::kStranger) ||",
            )
        ],
    ),
    "the ids of shrinks are not known": (
        *("worlds", "identity/ids.h"),
        [
            (
                "= *place_of(id) == id || count == kMost;",
                "= !WRONG && (*place_of(id) == id || count == kMost);",
            )
        ],
    ),
    "what NCCL told of a call is not in the digest": (
        *("worlds", "agree/stops.h"),
        [("size_bytes), marks);", "size_bytes), WRONG ? 0 : marks);")],
    ),
    "a stop in the middle of a group": (
        *("worlds", "agree/stops.h"),
        [(">= at_ && begins_group &&", ">= at_ && (begins_group || WRONG) &&")],
    ),
    "a shrink takes the table back": (
        *("worlds", "agree/stops.h"),
        [
            (
                "{ return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED); }",
                "{\n"
                "    if (WRONG) return votes_ = false, table_ = nullptr, true;\n"
                "    return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED);\n"
                "  }",
            )
        ],
    ),
    "an aborted rank abstains after it has confirmed": (
        *("worlds", "agree/ballot.h"),
        [("has_confirmed() ? Verdict::kFailed", "has_confirmed() && !WRONG ? Verdict::kFailed")],
    ),
    "a stop that failed is tried again in the same round": (
        *("worlds", "agree/stops.h"),
        [("    ++number_;\n    ++failures_;", "    if (!WRONG) ++number_;\n    ++failures_;")],
    ),
    "stops are not shifted by the communicator's id": (
        *("worlds", "agree/stops.h"),
        [
            (
                "mixed(mixed(0, comm_id_), number_) % width;",
                "(WRONG ? 0 : mixed(mixed(0, comm_id_), number_) % width);",
            )
        ],
    ),
    "whose time is up leaves by itself": (
        *("word", "agree/word.h"),
        [
            (
                "if (state_of(word) != WordState::kOpen)",
                "if (state_of(word) != WordState::kOpen || (WRONG && is_time_up))",
            ),
            (
                "decide(board, WordState::kAbstain, kLate);",
                "(void)(WRONG || (decide(board, WordState::kAbstain, kLate), true));",
            ),
        ],
    ),
}


@pytest.fixture(scope="module", name="explorer")
def explorer_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The explorer with all mutants, one of which DYNAMICCL_WRONG names by its number."""
    folder = tmp_path_factory.mktemp("explorer")
    for part in ("agree", "identity", "tests"):
        shutil.copytree(PLUGIN / part, folder / part)
    for number, (_, name, changes) in enumerate(MUTANTS.values()):
        path = folder / name
        text = path.read_text(encoding="utf-8")
        for before, after in changes:
            assert text.count(before) == 1
            text = text.replace(before, after.replace("WRONG", f"(wrong == {number})"))
        path.write_text(text, encoding="utf-8")
    (folder / "wrong.h").write_text(
        "#pragma once\n#include <cstdlib>\n"
        'inline const int wrong = std::atoi(std::getenv("DYNAMICCL_WRONG"));\n'
    )
    argv = [find_tool("g++"), "-std=c++17", "-O2", "-I.", "-include", "wrong.h", SOURCE]
    subprocess.run([*argv, "-o", "explore"], cwd=folder, check=True)
    return folder / "explore"


def begun(explorer: Path, part: str, wrong: int) -> subprocess.Popen[str]:
    environment = {"DYNAMICCL_FEW": "1", "DYNAMICCL_SEED": "0", "DYNAMICCL_WRONG": str(wrong)}
    return subprocess.Popen([explorer, part], env=environment, stderr=subprocess.PIPE, text=True)


@pytest.mark.parametrize("part", ["worlds", "random", "word"])
def test_explorer_finds_nothing_where_nothing_is_wrong(part: str, explorer: Path) -> None:
    with begun(explorer, part, -1) as process:
        _, said = process.communicate()
    assert (process.returncode, said) == (0, "")


@pytest.mark.parametrize("what", MUTANTS)
def test_explorer_finds_it(what: str, explorer: Path) -> None:
    with begun(explorer, MUTANTS[what][0], list(MUTANTS).index(what)) as process:
        assert process.stderr is not None
        assert ", after:" in process.stderr.readline()
        process.kill()  # it would look at further worlds
