"""A report on a policy named by its MLflow run: what is said, and the report kept beside it."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamiccl.datasets.store import content_hash
from dynamiccl.errors import UserError
from dynamiccl.evaluate.runs import log_report, named_policies
from dynamiccl.train.tracking import find_run, policy_directory, register
from tests.cli.conftest import Shell, refused
from tests.conftest import Trained

#: What MLflow calls the run: a report names the policy by it.
NAME = "ddqn-dueling-seed0"


@pytest.fixture(name="report")
def report_fixture(trained: Trained, shell: Shell, tmp_path: Path) -> Iterator[Path]:
    done = shell(*_command(trained), "--policy", trained.run_id, "--out", "report", "--json")
    assert done.json["page"] == "report/report.html"
    yield tmp_path / "report"
    shutil.rmtree(trained.run_directory / "report")  # the run is every test's


def _command(trained: Trained) -> tuple[object, ...]:
    store = ("--data", trained.data, "--tracking-uri", trained.tracking_uri)
    return ("dynamiccl-evaluate", "report", *store)


def test_page_names_the_run_and_is_kept_there(trained: Trained, report: Path) -> None:
    page = (report / "report.html").read_text(encoding="utf-8")
    assert f"<code>{NAME}</code> is run {trained.run_id}" in page
    kept = trained.run_directory / "report" / content_hash(trained.data)[:12]
    assert (kept / "report.html").read_text(encoding="utf-8") == page
    names = sorted(path.name for path in (report / "figures").iterdir())
    assert sorted(path.name for path in (kept / "figures").iterdir()) == names
    assert (kept / "summary.json").read_bytes() == (report / "summary.json").read_bytes()


def test_a_terminal_has_a_line_a_policy_and_nothing_is_kept_where_nobody_wants_it(
    trained: Trained, shell: Shell, tmp_path: Path
) -> None:
    name = "gaussian-process-seed12"
    policy = ("--policy", f"{name}={trained.run_id}", "--out", "b", "--no-log")
    lines = shell(*_command(trained), *policy).out.splitlines()
    assert not (trained.run_directory / "report").exists()
    found = json.loads((tmp_path / "b" / "summary.json").read_text())
    assert lines[-2:] == [found["page"], found["results"]]
    (left_out,) = [line for line in lines if line.startswith("rows in no task: ")]
    counts = [f"{count} {reason}" for reason, count in found["rows_left_out"].items()]
    assert left_out.removeprefix("rows in no task: ") == ", ".join(counts)
    for system in found["systems"].values():
        assert f"  {name}: {system['sentences'][name]}" in lines
        assert f"  {system['verdicts'][0]}" in lines
        for policy_name, each in system["policies"].items():
            (line,) = [line for line in lines if line.startswith(f"  {policy_name}  ")]
            assert f"{100 * each['gain_crossfit'] + 0.0:.1f} (" in line
            assert len(line) <= 100


def test_run_that_is_not_there_takes_no_report(trained: Trained, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("a page")
    with pytest.raises(UserError, match="does not hold it"):
        log_report([page], "0" * 32, trained.tracking_uri, "1" * 64)


def test_runs_are_found_by_every_name_but_a_folders(trained: Trained, shell: Shell) -> None:
    uri = trained.tracking_uri
    version = register(uri, trained.run_id, "shown")
    for name in (trained.run_id, f"runs:/{trained.run_id}/policy"):
        assert find_run(name, uri) == trained.run_id
    for which in ("@shown", f"/{version}", "/latest"):
        name = f"models:/dynamiccl{which}"
        assert policy_directory(name, uri).is_dir()
        assert find_run(name, uri) == trained.run_id
    assert find_run(str(trained.run_directory), uri) is None
    assert find_run("s3://bucket/policy", uri) is None
    with pytest.raises(UserError, match="cannot track"):
        find_run("models:/dynamiccl@nobody", uri)
    gone = shell(*_command(trained), "--policy", "0123456789abcdef", "--out", "gone")
    assert f"list the runs with 'mlflow ui --backend-store-uri {uri}'" in refused(gone, 2)


def test_policies_have_the_name_that_is_given_or_that_of_their_run_or_recipe(
    trained: Trained,
) -> None:
    given = [f"mine={trained.run_id}", trained.run_id, str(trained.policy), str(trained.policy)]
    named = named_policies(given, trained.tracking_uri)
    recipe = "ddqn-dueling"
    assert [each.name for each in named] == ["mine", NAME, f"{recipe}-1", f"{recipe}-2"]
    assert [each.run_id for each in named] == [trained.run_id, trained.run_id, None, None]
