"""A whole report on simulated data."""

import html
import json
import re
from pathlib import Path

import polars as pl
import pytest

from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.store import content_hash, measurements_table, read, write_part
from dynamiccl.errors import NotEnoughData
from dynamiccl.evaluate.blocks import TableBlock
from dynamiccl.evaluate.origins import origin_section
from dynamiccl.evaluate.report import make_report
from tests.conftest import Trained
from tests.data_sets import SWEEP, SYSTEM, make_data
from tests.rows import default, forced
from tests.splits import split_of

BASELINES = (
    "nccl-default",
    "random",
    "best-fixed",
    "pooled-fixed",
    "five-bins",
    "nearest-size",
    "interpolated",
    "gradient-boosting",
    "coordinate-descent",
    "oracle",
)


@pytest.fixture(scope="module")
def report_dir(trained: Trained, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("report")
    make_report(trained.data, [("policy", trained.policy)], out)
    return out


def test_results_hold_every_policy_on_test_sizes_only(report_dir: Path) -> None:
    results = pl.read_parquet(report_dir / "results.parquet")
    assert set(results["policy"]) == {"policy", *BASELINES}
    assert {split_of(size) for size in results["size_bytes"]} == {"test"}
    assert (results["regret"] >= 0).all()
    default = results.filter(policy="nccl-default")
    assert (default["chosen_us"] == default["default_us"]).all()


def test_policy_beats_the_default_on_simulated_all_reduce(report_dir: Path) -> None:
    summary = json.loads((report_dir / "summary.json").read_text())
    policies = summary["systems"][SYSTEM]["by_collective"]["AllReduce"]
    assert policies["nccl-default"]["mean"] > summary["systems"][SYSTEM]["noise_band"]
    assert policies["policy"]["mean"] < policies["nccl-default"]["mean"] / 2
    assert policies["policy"]["mean"] < 0.05


def test_the_search_tells_what_it_tried_and_the_oracle_has_no_regret(report_dir: Path) -> None:
    summary = json.loads((report_dir / "summary.json").read_text())
    policies = summary["systems"][SYSTEM]["policies"]
    assert {name for name, figures in policies.items() if figures["probes"]} == {
        "coordinate-descent"
    }
    assert policies["oracle"]["max"] == 0.0
    assert policies["coordinate-descent"]["mean"] < policies["nccl-default"]["mean"]


def test_tasks_where_the_default_is_beyond_the_noise_stand_apart(report_dir: Path) -> None:
    found = json.loads((report_dir / "summary.json").read_text())["systems"][SYSTEM]
    beyond, whole = found["beyond_noise"], found["policies"]
    assert 0 < beyond["policy"]["tasks"] < whole["policy"]["tasks"]
    assert beyond["nccl-default"]["mean"] > whole["nccl-default"]["mean"]
    assert beyond["nccl-default"]["p50"] > found["noise_band"]
    page = (report_dir / "report.html").read_text(encoding="utf-8")
    assert "NCCL&#39;s default itself is beyond the noise band" in page


def test_page_is_self_contained_and_says_simulated(report_dir: Path) -> None:
    page = (report_dir / "report.html").read_text(encoding="utf-8")
    assert "Learning curves" not in page  # of a policy's folder, which is no run
    assert page.count("<svg") >= 4  # two families, each a heat map and curves
    assert not re.search(r"<script|<link|src=[\"']http|href=[\"']http|url\(http", page)
    assert ">simulated<" in page
    for name in ("policy", *BASELINES):
        assert f"<td>{name}</td>" in page


def test_every_figure_of_the_page_is_a_file_too(report_dir: Path) -> None:
    page = (report_dir / "report.html").read_text(encoding="utf-8")
    files = sorted((report_dir / "figures").iterdir())
    assert {f"{SYSTEM}-1-{kind}.svg" for kind in ("configs", "policies", "crossovers")} <= {
        path.name for path in files
    }
    assert {f"{SYSTEM}-{kind}.svg" for kind in ("map", "by-size")} <= {p.name for p in files}
    assert page.count("<svg") == len(files)
    for path in files:
        assert path.read_text(encoding="utf-8") in page


def test_data_without_a_test_size_says_which_to_measure(trained: Trained, tmp_path: Path) -> None:
    data = make_data(
        tmp_path / "store", SWEEP.replace('min = "64K", max = "1G"', 'min = "1M", max = "2M"')
    )
    with pytest.raises(NotEnoughData, match="no test task"):
        make_report(data, [("policy", trained.policy)], tmp_path / "out")


def test_page_begins_with_a_sentence_the_map_and_a_verdict_and_folds_the_rest(
    report_dir: Path, trained: Trained
) -> None:
    page = (report_dir / "report.html").read_text(encoding="utf-8")
    summary = json.loads((report_dir / "summary.json").read_text())["systems"][SYSTEM]
    sentence = summary["sentences"]["policy"]
    assert re.search(r"AllReduce .*: up to \d+ % less time", sentence)
    first, rest = page[: page.index("<details")], page[page.index("<details") :]
    plain = html.unescape(first)
    at = [plain.index(text) for text in (sentence, "simple table", "<svg")]
    assert at == sorted(at)
    assert first.count("<svg") == 1
    shown = re.findall(r"<h2[^>]*>([^<]*?)\s*(?:<|$)", first)
    folded = re.findall(r'class="part"><summary>([^<]*?)\s*(?:<|$)', rest)
    assert shown == [SYSTEM]
    figures = f"{SYSTEM}: all figures"
    assert folded == ["Regret on all systems", figures, "Where the figures come from"]
    assert re.findall(r'<a href="#part-\d+">([^<]*)</a>', first) == [*shown, *folded]
    assert all(f'id="part-{number}"' in page for number in range(1, 5))
    short = rest[: rest.index(figures)]
    ours = summary["policies"]["policy"]
    low, high = ours["interval"]
    assert f"<td>{ours['crossfit']:.2%} ({low:.2%} to {high:.2%})</td>" in short
    assert f"<td>{summary['noise_band']:.2%}</td>" in short
    manifest = Manifest.read(trained.policy)
    origin = page[page.rindex("Where the figures come from") :]
    assert f"<td>{manifest.git_commit[:12]}" in origin
    for text in (manifest.created, f"{manifest.data_hash[:12]} (these)"):
        assert f"<td>{text}</td>" in origin
    assert f"hash {content_hash(trained.data)}" in origin
    for text in ("simulator", "2.27.5", "AllGather, AllReduce", "4 x 8", "3 of 3", "run"):
        assert f"<td>{text}</td>" in origin


def test_origin_tells_what_is_not_known_and_other_data(trained: Trained, tmp_path: Path) -> None:
    rows = [
        default(size_bytes=1 << 20),
        forced("Ring", "LL", throttled=True),
        forced("Tree", None, ecc_errors=1),
    ]
    write_part(tmp_path, measurements_table(rows), provenance={"tool": "import"})
    section = origin_section(tmp_path, read(tmp_path), {"p": Manifest.read(trained.policy)})
    tables = [block for block in section.blocks if isinstance(block, TableBlock)]
    measured, written, policies = (dict(zip(t.heads, t.rows[0], strict=True)) for t in tables)
    assert measured["measured"] == "not known"
    assert measured["timed"] == "1"
    assert "rows in no task: 2 without a time of healthy GPUs." in section.text
    assert (measured["rows"], measured["runs"], measured["NCCL"]) == ("3", "1", "2.27.5")
    assert (written["written by"], written["commit"]) == ("import", "not known")
    assert policies["trained on data"].endswith("(others)")
    assert (policies["runs of these data"], policies["gate"]) == ("0 of 1", "none")


def test_a_sweep_that_drew_its_configs_tells_what_a_free_choice_is_worth(
    trained: Trained, report_dir: Path, tmp_path: Path
) -> None:
    title = "Estimated from what the sweep drew"
    assert title not in (report_dir / "report.html").read_text(encoding="utf-8")
    strategy = 'strategy = { kind = "random", share = 0.5 }\n[simulator]'
    text = SWEEP.replace("cycles = 3", "cycles = 6").replace("[simulator]", strategy)
    data = make_data(tmp_path / "store", text)
    make_report(data, [("policy", trained.policy)], tmp_path / "out")
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert title in page
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    found = summary["systems"][SYSTEM]["logged"]["policy"]
    assert 0 < found["acts"] <= found["tasks"]
    assert found["DM"]["mean"] < 1.05
    assert f"{found['DM']['mean']:.4f}" in page
