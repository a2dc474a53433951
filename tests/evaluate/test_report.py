"""A whole report on simulated data, and one on a policy named by its MLflow run."""

import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.store import content_hash, measurements_table, write_part
from dynamiccl.errors import NotEnoughData
from dynamiccl.evaluate.baselines import named_policies
from dynamiccl.evaluate.report import make_report
from tests.cli.conftest import Shell
from tests.conftest import Trained
from tests.data_sets import SWEEP, SYSTEM, make_data
from tests.rows import default, forced, split_of

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


@pytest.fixture(autouse=True)
def its_store(trained: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", trained.tracking_uri)


def test_a_page_names_its_run_and_is_kept_there(
    trained: Trained, shell: Shell, tmp_path: Path
) -> None:
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
