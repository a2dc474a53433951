"""A report on a policy named by its MLflow run: its curves, and the report kept beside it."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from dynamiccl.datasets.store import content_hash
from dynamiccl.errors import UserError
from dynamiccl.evaluate.named import named_policies
from dynamiccl.evaluate.training import Training, log_report
from dynamiccl.train.tracking import find_run, policy_directory, register, reopen_run
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


def test_page_shows_how_the_run_learned_and_is_kept_there(trained: Trained, report: Path) -> None:
    page = (report / "report.html").read_text(encoding="utf-8")
    assert f"<code>{NAME}</code> is run {trained.run_id}" in page
    assert f"Learning curves of {NAME}" in page
    kept = trained.run_directory / "report" / content_hash(trained.data)[:12]
    assert (kept / "report.html").read_text(encoding="utf-8") == page
    names = sorted(path.name for path in (report / "figures").iterdir())
    assert f"training-{NAME}.svg" in names
    assert sorted(path.name for path in (kept / "figures").iterdir()) == names
    assert (kept / "summary.json").read_bytes() == (report / "summary.json").read_bytes()


def test_nothing_is_kept_where_nobody_wants_it(trained: Trained, shell: Shell) -> None:
    unlogged = ("--policy", trained.run_id, "--out", "b", "--no-log", "--json")
    page = Path(shell(*_command(trained), *unlogged).json["page"]).read_text(encoding="utf-8")
    assert "Learning curves" in page
    assert not (trained.run_directory / "report").exists()


def test_run_that_is_not_there_takes_no_report(trained: Trained, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    page.write_text("a page")
    with pytest.raises(UserError, match="does not hold it"):
        log_report([page], "0" * 32, trained.tracking_uri, "1" * 64)


@pytest.mark.usefixtures("drawn")
def test_curves_are_those_of_the_run(trained: Trained) -> None:
    training = Training.read(trained.run_id, trained.tracking_uri)
    assert list(training.losses) == list(training.regrets) == list(range(100, 901, 100))
    assert training.best_step in training.regrets
    assert training.default_regret is not None
    run = reopen_run(trained.tracking_uri, trained.run_id)
    assert 100 in run.history("loss")
    assert run.history("nothing") == {}
    drawn = training.block("policy")
    assert f"step {training.best_step} were exported" in drawn.note
    assert re.search(r">NCCL's default<|>NCCL&apos;s default<", drawn.svg)


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
