"""The explorer of the vote finds what would break the law: one changed line of `agree/` each."""

import shutil
import subprocess
from pathlib import Path

import pytest

from dynamiccl.serve.build import find_tool

PLUGIN = Path(__file__).resolve().parents[2] / "serve" / "plugin"
SOURCE = "tests/test_agree_explore.cpp"
#: What is wrong -> the part of the explorer that finds it, the file, and texts before and after.
MUTANTS = {
    "a rank abstains after it has confirmed": (
        *("worlds", "agree/ballot.h"),
        [("end(Verdict::kFailed,", "end(Verdict::kAbstain,")],
    ),
    "table when all but one have confirmed": (
        *("worlds", "agree/rounds.h"),
        [("if (round.num_confirmed <", "if (round.num_confirmed + 1 <")],
    ),
    "a rank counts before it says that it differs": (
        *("word", "agree/word.h"),
        [
            ("first == own ? Step::kCount : Step::kDiffer", "Step::kCount"),
            (
                "if (is_time_up) decide",
                "if (is_time_up || board->fields[2] != vote->fields[2]) decide",
            ),
        ],
    ),
    "no log": (
        *("worlds", "agree/rounds.h"),
        [("if (outlet->log(table))", "if (table.num_ranks > 0)")],
    ),
    "a table that could not be logged": (
        *("worlds", "agree/rounds.h"),
        [("if (outlet->log(table))", "if (outlet->log(table) || true)")],
    ),
    "a table is forgotten at the first vote of the next round": (
        *("random", "agree/rounds.h"),
        [
            (
                "  std::string why = difference(",
                "  forget_before(key);\n  std::string why = difference(",
            )
        ],
    ),
    "an unknown recall is answered by silence": (
        *("worlds", "agree/rounds.h"),
        [
            (
                "    bind(from, key, &round, vote.nonce);\n    if (!is_known) {",
                "    if (!is_known) {\n"
                "    if (round.voters.empty()) rounds_.erase(key);\n"
                "    return;",
            )
        ],
    ),
    "a stranger's answer counts": (
        *("worlds", "agree/ballot.h"),
        [("heard.kind == ReplyKind::kStranger || ", "")],
    ),
    "the ids of shrinks are not known": (
        *("worlds", "identity/ids.h"),
        [("may_repeat = *place_of(id) == id || count == kMost;", "may_repeat = false;")],
    ),
    "what NCCL told of a call is not in the digest": (
        *("worlds", "agree/stops.h"),
        [("size_bytes), marks);", "size_bytes), marks & 0);")],
    ),
    "a stop in the middle of a group": (
        *("worlds", "agree/stops.h"),
        [(">= at_ && begins_group &&", ">= at_ &&")],
    ),
    "a shrink takes the table back": (
        *("worlds", "agree/stops.h"),
        [
            (
                "{ return __atomic_exchange_n(&votes_, false, __ATOMIC_RELAXED); }",
                "{ return votes_ = false, table_ = nullptr, true; }",
            )
        ],
    ),
    "an aborted rank abstains after it has confirmed": (
        *("worlds", "agree/ballot.h"),
        [("has_confirmed() ? Verdict::kFailed : Verdict::kAbstain", "Verdict::kAbstain")],
    ),
    "a stop that failed is tried again in the same round": (
        *("worlds", "agree/stops.h"),
        [("    ++number_;\n    ++failures_;", "    ++failures_;")],
    ),
    "stops are not shifted by the communicator's id": (
        *("worlds", "agree/stops.h"),
        [("at_ = earliest + mixed(mixed(0, comm_id_), number_) % width;", "at_ = earliest;")],
    ),
    "whose time is up leaves by itself": (
        *("word", "agree/word.h"),
        [
            (
                "if (state_of(word) != WordState::kOpen)",
                "if (state_of(word) != WordState::kOpen || is_time_up)",
            ),
            ("if (is_time_up) decide(board, WordState::kAbstain, kLate);", ""),
        ],
    ),
}


@pytest.fixture(scope="module", name="explorer")
def explorer_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sources of the explorer, of which a mutant changes one."""
    folder = tmp_path_factory.mktemp("explorer")
    for part in ("agree", "identity", "tests"):
        shutil.copytree(PLUGIN / part, folder / part)
    return folder


@pytest.mark.parametrize("what", MUTANTS)
def test_explorer_finds_it(what: str, explorer: Path) -> None:
    part, name, changes = MUTANTS[what]
    path = explorer / name
    before_all = text = path.read_text(encoding="utf-8")
    for before, after in changes:
        assert text.count(before) == 1
        text = text.replace(before, after)
    path.write_text(text, encoding="utf-8")
    argv = [find_tool("g++"), "-std=c++17", "-O1", "-I.", SOURCE, "-o", "explore"]
    subprocess.run(argv, cwd=explorer, check=True)
    path.write_text(before_all, encoding="utf-8")
    ran = subprocess.run(
        ["./explore", part],
        cwd=explorer,
        env={"DYNAMICCL_FEW": "1", "DYNAMICCL_SEED": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode > 0, ran.stdout
    assert ", after:" in ran.stderr
