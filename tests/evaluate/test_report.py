"""A whole report: its figures, its first screen, and one on a policy named by its MLflow run."""

import html
import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.store import content_hash, measurements_table, write_part
from dynamiccl.errors import NotEnoughData
from dynamiccl.evaluate.baselines import FAMILY, named_policies
from dynamiccl.evaluate.metrics import result_rows
from dynamiccl.evaluate.page import draw_map, render, say
from dynamiccl.evaluate.report import changes_of, facts_of, make_report, verdict_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from dynamiccl.sizes import size_bin
from tests.cli.conftest import Shell
from tests.conftest import Trained
from tests.data_sets import SWEEP, SYSTEM, make_data
from tests.evaluate.test_metrics import NAN, grid, noise
from tests.rows import default, forced, split_of

MAPPED = Catalogue(
    (ABSTAIN, Config(Algorithm.Ring, Protocol.LL, 2), Config(Algorithm.Tree, Protocol.LL128))
)
MAP_SIZES = [1 << 10, 1 << 11, 1 << 12, 1 << 20]
MAP_US = [[10.0, 20.0, NAN], [10.0, 9.9, 40.0], [25.0, 20.0, 240.0], [20.0, 90.0, 10.0]]
CHOICES = {
    "nccl-default": [0, 0, 0, 0],
    "mine": [0, 1, 1, 2],
    "other": [1, 1, 0, 2],
    "near": [0, 0, 0, 2],
    "oracle": [0, 1, 1, 2],
}


def rows(band: float | None = 0.02) -> pl.DataFrame:
    """The `result_rows` of a family of four sizes."""
    columns = dict.fromkeys(FAMILY, "x") | {"system": "s", "collective": "AllReduce"}
    known = grid(MAP_SIZES, MAP_US, **columns)
    splits = pl.Series("split", ["train", "test", "train", "validation"])
    bins = pl.Series("bin", [size_bin(size) for size in MAP_SIZES])
    known = replace(known, tasks=known.tasks.with_columns(splits, bins))
    choices = {name: np.array(each) for name, each in CHOICES.items()}
    return result_rows(known, MAPPED, choices, noise(band))


def texts(svg: str) -> list[str]:
    return [text.strip() for text in re.findall(r"<text[^>]*>([^<]*)</text>", svg)]


@pytest.mark.usefixtures("drawn")
def test_the_map_says_what_is_best_and_chosen_and_changes_are_listed() -> None:
    found = texts(draw_map(rows(), ["mine", "other"]))
    # Ring/LL at 2K is faster by 1 %: within the noise, which the row of the best says.
    marks = [text for text in found if re.fullmatch(r"·|[AB] -?\d+", text)]
    best, mine, other = ["·", "·", "A 20", "B 50"], ["·", "A 1", "A 20", "B 50"], ["A -100", "A 1"]
    assert marks == [*best, *mine, *other, "·", "B 50"]
    family = "AllReduce, x x x ranks, launch profile x: best measured"
    assert {"1K", "2K *", "4K", "1M", family} <= {*found}
    assert {"mine", "other"} <= {*found}
    for legend in ("A  Ring/LL", "B  Tree/LL128"):
        assert legend in found
    assert any(text.endswith("NCCL's own choice, or as fast within the noise") for text in found)
    changed = changes_of(rows(), "other", "mine")
    assert (changed["system"], changed["before"], changed["after"]) == ("s", "other", "mine")
    keys = ("size_bytes", "split", "before", "after", "saved")
    assert [tuple(task[key] for key in keys) for task in changed["tasks"]] == [
        (1 << 10, "train", "Ring/LL/2ch", "ABSTAIN", 0.5),
        (1 << 12, "train", "ABSTAIN", "Ring/LL/2ch", pytest.approx(0.2)),
    ]
    assert changes_of(rows(), "mine", "mine")["tasks"] == []


MIB = 1 << 20
#: NCCL's default, and two configs: faster in the middle, slower at the end.
TIMES = [[10.0, 10.0], [10.0, 6.0], [10.0, 7.0], [10.0, 9.9], [10.0, 15.0]]
SIZES = [MIB >> 10, MIB, 16 * MIB, 64 * MIB, 256 * MIB]
CATALOGUE = Catalogue((ABSTAIN, Config(Algorithm.Ring, Protocol.LL)))
EVERY_OTHER = [[10.0, 5.0 if index % 2 == 0 else 10.0] for index in range(5)]
STANDS = "NCCL's own choice stands everywhere"
MOST = "a measured config takes up to 40 % less time (AllReduce 1M)"


def facts(actions: list[int], band: float | None = 0.03, times: Any = TIMES) -> dict[str, Any]:
    choices = {"p": np.array(actions)}
    return facts_of(result_rows(grid(SIZES, times), CATALOGUE, choices, noise(band)))


@pytest.mark.parametrize(
    ("actions", "changes", "told"),
    [
        (
            [0, 1, 1, 0, 1],
            {},
            "AllReduce 1M-16M: up to 40 % less time; AllReduce 256M: up to 50 % MORE time; "
            "elsewhere NCCL's own choice stands",
        ),
        ([0, 0, 0, 1, 0], {}, f"As fast as NCCL's own choice within the noise everywhere; {MOST}"),
        ([0] * 5, {}, f"{STANDS}; {MOST}"),
        (
            [1] * 5,
            {"band": None, "times": [[10.0, 10.0]] * 5},
            "As fast as NCCL's own choice everywhere; no measured config is faster (noise unknown: "
            "no repeats)",
        ),
        (
            [1] * 5,
            {"times": EVERY_OTHER},
            "AllReduce at 3 of 5 sizes, 1K-256M: up to 50 % less time; elsewhere as fast as NCCL's "
            "own choice within the noise",
        ),
    ],
)
def test_where_it_gains_and_loses(actions: list[int], changes: dict[str, Any], told: str) -> None:
    assert say("report", "sentence", facts(actions, **changes)) == told


def test_the_title_says_on_how_many_systems_each_policy_gains() -> None:
    gains, loses, rests = facts([0, 1, 1, 0, 0]), facts([0, 1, 1, 0, 1]), facts([0] * 5)
    told = {"mine": [gains, loses, rests], "other": [rests, rests, rests]}
    assert say("report", "headline", told) == (
        "mine takes up to 40 % less time than NCCL's own choice on 2 of 3 systems, and takes up to "
        "50 % MORE on 1 of 3 systems; other leaves everything to NCCL"
    )
    assert say("report", "headline", {"mine": [gains]}) == (
        "mine takes up to 40 % less time than NCCL's own choice"
    )
    means = {"mine": {"mean": 0.1, "least": -0.03}}
    assert render("report.txt", {"reports": [], "means": means}).strip() == (
        "mine takes 10 % less time than NCCL's own choice in the mean of the turns, 3.0 % MORE in "
        "the worst"
    )


@pytest.mark.parametrize(
    ("gain", "told"),
    [
        (0.10, "No simple table saves more than mine: 10 % less time than NCCL's own choice on"),
        (0.04, "1 of 2 simple tables is better than mine beyond the noise: 4.0 % less time than"),
        (-0.5, "2 of 2 simple tables are better than mine beyond the noise: 50 % MORE time"),
    ],
)
def test_a_verdict_sets_a_policy_beside_the_simple_tables(gain: float, told: str) -> None:
    """Searchers and the oracle are no simple tables."""
    gains = {"mine": gain, "near": 0.08, "far": 0.05, "oracle": 0.2, "descent": 0.2}
    rows = {
        name: {
            "policy": name,
            "gain": each,
            "probes": 4.0 * (name == "descent"),
            "noise_band": 0.03,
        }
        for name, each in gains.items()
    }
    found = verdict_of("mine", rows, ["mine"])
    assert found.startswith(told)
    assert found.endswith("on average, 8.0 % less with near.")
    unknown = {name: {**row, "noise_band": None} for name, row in rows.items()}
    assert "the noise" not in verdict_of("mine", unknown, ["mine"])


BASELINES = (
    *("nccl-default", "random", "best-fixed", "pooled-fixed", "five-bins", "nearest-size"),
    *("interpolated", "gradient-boosting", "coordinate-descent", "oracle"),
)


@pytest.fixture(scope="module")
def made(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return make_report(trained.data, [("policy", trained.policy)], tmp_path_factory.mktemp("made"))


@pytest.fixture(name="page")
def page_fixture(made: dict[str, Any]) -> str:
    return Path(made["page"]).read_text(encoding="utf-8")


def test_results_hold_every_policy_on_test_sizes_and_the_summary_their_gains(
    made: dict[str, Any],
) -> None:
    results = pl.read_parquet(made["results"])
    assert set(results["policy"]) == {"policy", *BASELINES}
    assert {split_of(size) for size in results["size_bytes"]} == {"test"}
    assert (results["regret"] >= 0).all()
    default = results.filter(policy="nccl-default")
    assert (default["chosen_us"] == default["default_us"]).all()
    assert json.loads((Path(made["page"]).parent / "summary.json").read_text()) == made
    found = made["systems"][SYSTEM]
    band, reduced = found["noise_bands"]["AllReduce"], found["by_collective"]["AllReduce"]
    assert reduced["nccl-default"]["mean"] > band
    assert reduced["policy"]["mean"] < min(0.05, reduced["nccl-default"]["mean"] / 2)
    whole, beyond = found["policies"], found["beyond_noise"]
    assert {name for name, each in whole.items() if each["probes"]} == {"coordinate-descent"}
    assert whole["oracle"]["max"] == 0.0
    assert whole["coordinate-descent"]["mean"] < whole["nccl-default"]["mean"]
    assert 0 < beyond["policy"]["tasks"] < whole["policy"]["tasks"]
    assert beyond["nccl-default"]["mean"] > max(band, whole["nccl-default"]["mean"])


def test_page_is_self_contained_with_files_of_figures(made: dict[str, Any], page: str) -> None:
    assert not re.search(r"<script|<link|src=[\"']http|href=[\"']http|url\(http", page)
    assert ">simulated<" in page
    assert 'name="viewport"' in page
    assert "NCCL's default itself is beyond the noise band" in page
    for name in ("policy", *BASELINES):
        assert f"<td>{name}</td>" in page
    # What is wide scrolls in a box of its own.
    boxed = r'<div class="wide"[^>]*>\s*<(table|svg)'
    assert len(re.findall(boxed, page)) == page.count("<table") + page.count("<svg")
    assert page.count('<tr class="ours"><td>policy</td>') == 4  # all, beyond noise, two collectives
    folder = Path(made["page"]).parent / "figures"
    files = {path.name: path.read_text(encoding="utf-8") for path in folder.iterdir()}
    assert files.keys() == {f"{SYSTEM}-{kind}.svg" for kind in ("map", "gains")}
    assert page.count("<svg") == len(files)
    assert all(text in page for text in files.values())


def test_data_without_a_test_size_says_which_to_measure(trained: Trained, tmp_path: Path) -> None:
    rows = [default(), *(forced(each, "LL") for each in ("Ring", "Tree"))]
    write_part(tmp_path, measurements_table(rows), provenance={})
    with pytest.raises(NotEnoughData, match="no test task"):
        make_report(tmp_path, [("policy", trained.policy)], tmp_path / "out")


def test_page_begins_with_verdict_and_map(
    made: dict[str, Any], page: str, trained: Trained
) -> None:
    page, told, summary = html.unescape(page), made, made["systems"][SYSTEM]
    sentence, (verdict,) = summary["sentences"]["policy"], summary["verdicts"]
    assert re.search(r"AllReduce .*: up to \d+ % less time", sentence)
    assert told["headline"].startswith("policy takes up to")
    first, rest = page[: page.index("<details")], page[page.index("<details") :]
    parts = (f"<h1>{told['headline']}</h1>", f"{sentence}.", "<svg", verdict)
    at = [first.index(text) for text in parts]
    assert at == sorted(at)
    assert first.count("<svg") == 1
    low, high = (100 * end for end in summary["policies"]["policy"]["gain_interval"])
    gain = 100 * summary["policies"]["policy"]["gain_crossfit"]
    assert f"<td>{gain:.1f} ({low:.1f} to {high:.1f})</td>" in rest
    origin = page[page.rindex("Where the figures come from") :]
    assert f"<td>{Manifest.read(trained.policy).git_commit[:12]}" in origin
    assert f"hash {content_hash(trained.data)}" in origin


def test_a_drawn_sweep_tells_of_free_choices(trained: Trained, page: str, tmp_path: Path) -> None:
    title = "Estimated from what the sweep drew"
    assert title not in page
    strategy = 'strategy = { kind = "random", share = 0.5 }\n[simulator]'
    text = SWEEP.replace("cycles = 3", "cycles = 6").replace("[simulator]", strategy)
    data = make_data(tmp_path / "store", text)
    drew = make_report(data, [("a<b", trained.policy)], tmp_path / "out")
    page = Path(drew["page"]).read_text(encoding="utf-8")
    assert title in page
    found = drew["systems"][SYSTEM]["logged"]["a<b"]
    assert 0 < found["acts"] <= found["tasks"]
    assert found["DM"]["mean"] < 1.05
    assert f"<td>{100 - 100 * found['DM']['mean']:.1f}</td>" in page
    assert "<td>a&lt;b</td>" in page


#: What MLflow calls the run: a report names the policy by it.
NAME = "ddqn-dueling-seed0"


def test_a_page_names_its_run_and_is_kept_there(
    trained: Trained, shell: Shell, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", trained.tracking_uri)
    asked = ("--data", trained.data, "--policy", trained.run_id, "--out", "report")
    done = shell("dynamiccl-evaluate", "report", *asked, "--json")
    assert done.json["page"] == "report/report.html"
    report, kept = tmp_path / "report", trained.run_directory / "report"
    page = (report / "report.html").read_text(encoding="utf-8")
    assert f"<code>{NAME}</code> is run {trained.run_id}" in page
    [same] = kept.iterdir()
    assert same.name == content_hash(trained.data)[:12]
    for path in report.rglob("*.*"):
        copied = same / path.relative_to(report)
        assert path.suffix == ".parquet" or copied.read_bytes() == path.read_bytes()
    shutil.rmtree(kept)  # the run is every test's
    # Policies have the name that is given, or that of their run or recipe.
    given = [f"mine={trained.run_id}", trained.run_id, str(trained.policy), str(trained.policy)]
    named = named_policies(given, trained.tracking_uri)
    recipe = "ddqn-dueling"
    assert [each.name for each in named] == ["mine", NAME, f"{recipe}-1", f"{recipe}-2"]
    assert [each.run_id for each in named] == [trained.run_id, trained.run_id, None, None]
