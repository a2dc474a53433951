"""Tables with slack, through the commands: what they give back, refuse, promise and show."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import numpy as np
import polars as pl
import pytest
import torch

from dynamiccl.datasets import store
from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import task_grid
from dynamiccl.datasets.manifest import Manifest, Slack
from dynamiccl.datasets.questions import table_supports
from dynamiccl.datasets.splits import Split
from dynamiccl.datasets.store import measurements_table
from dynamiccl.errors import UserError
from dynamiccl.evaluate.baselines import LearnedPolicy
from dynamiccl.evaluate.evidence import Verdict
from dynamiccl.evaluate.gate import abstaining_cells, let_bins_between_pass
from dynamiccl.serve.artifact import open_artifact
from dynamiccl.serve.brain import POLICIES
from dynamiccl.sizes import size_bin
from dynamiccl.train.policy import TorchPolicy
from tests.calls import calls_table, traced
from tests.cli.conftest import Shell, refused
from tests.data_sets import SWEEP
from tests.policies import hand_made_manifest
from tests.rows import default, forced, frame

#: Config -> time over NCCL's own choice, which takes 16 channels; and channels that it takes.
CONFIGS: Final = {
    ("Ring", "LL", 2): (1.08, 2),
    ("Ring", "LL", 4): (1.02, 4),
    ("Ring", "LL", 8): (1.01, None),  # never read back
    ("Ring", "LL128", None): (1.0, 16),
    ("Ring", "Simple", 24): (0.7, 24),
}
SIZES: Final = [1 << k for k in range(18, 25)]
#: From here on the config of 4 channels is slower in fresh runs than anybody expected.
SLOW_FROM: Final = 1 << 22


def rows(sweep: str, runs: int, collective: str = "AllReduce") -> Iterator[dict[str, Any]]:
    random = np.random.default_rng(0)
    for run in range(runs):
        for size in SIZES:
            where: dict[str, Any] = {
                "sweep": sweep, "run": f"{sweep}-{run}", "repeat": run, "size_bytes": size,
                "collective": collective,
            }  # fmt: skip
            noise = random.lognormal(0.0, 0.002, 1 + len(CONFIGS))
            yield default(100.0 * noise[0], actual_num_channels=16, **where)
            for i, ((algorithm, protocol, channels), (ratio, used)) in enumerate(CONFIGS.items()):
                is_slow = sweep == "fresh" and channels == 4 and size >= SLOW_FROM
                time_us = 100.0 * noise[1 + i] * (1.12 if is_slow else ratio)
                asked = {"channels": channels, "actual_num_channels": used}
                yield forced(algorithm, protocol, time_us, **asked, **where)


class Sure(torch.nn.Module):
    """Expects the times of CONFIGS everywhere, and is as sure of them as is said."""

    log_times: torch.Tensor

    def __init__(self, log_times: list[float], spread: float) -> None:
        super().__init__()
        self.register_buffer("log_times", torch.tensor(log_times, dtype=torch.float64))
        self.spread = spread

    def forward(
        self, window: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        z, spread, caution = self.predict(context)
        sure = (mask > 0.5) & (-z > (caution.unsqueeze(1) * spread).clamp(min=0.001))
        best = z.masked_fill(~sure, float("inf")).argmin(dim=1)
        action = torch.where(sure.any(dim=1), best, torch.zeros_like(best))
        return action, (-z.exp()).float().masked_fill(mask < 0.5, -1e6) + 0.0 * window.sum()

    @torch.jit.export
    def predict(self, context: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        z = self.log_times[None].expand(context.shape[0], -1)
        return z, torch.full_like(z, self.spread), torch.full_like(z[:, 0], 2.0)


class Means(torch.nn.Module):
    """As Sure, but a network's: it tells no spread, and leaves all to NCCL."""

    def __init__(self, sure: Sure) -> None:
        super().__init__()
        self.sure = sure

    def forward(
        self, window: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        action, q = self.sure(window, context, mask)
        return torch.zeros_like(action), q


def make_policy(folder: Path, measured: pl.DataFrame, spread: float | None = 0.01) -> Path:
    """One that expects the median ratios of what was measured, at every size."""
    noise = measured.select("system", "collective", noise_band=0.01).unique()
    manifest = hand_made_manifest(measured, noise)
    grid = task_grid(measured, manifest.actions(), list(Split))
    ratios = np.nanmedian(grid.times_us / grid.default_us[:, None], axis=0)
    folder.mkdir()
    sure = Sure(np.log(ratios).tolist(), spread or 0.0)
    policy = Means(sure) if spread is None else sure
    torch.jit.script(policy).save(str(folder / "policy.pt"))  # type: ignore[no-untyped-call]
    manifest.write(folder)
    return folder


@pytest.fixture(name="policy", scope="module")
def policy_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_policy(tmp_path_factory.mktemp("slack") / "policy", frame(*rows("trained", 1)))


@pytest.fixture(name="fresh", scope="module")
def fresh_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fresh")
    store.write_part(folder, measurements_table(list(rows("fresh", 6))), provenance={})
    return folder


def calls_of(folder: Path, *calls: dict[str, Any]) -> Path:
    store.write_part(folder, calls_table(*calls), kind="calls", provenance={})
    return folder


def decisions(shell: Shell, artifact: object) -> dict[int, dict[str, Any]]:
    found = shell("dynamiccl-deploy", "table", artifact, "--group", "1x8", "--json").json
    return {row["bin"]: row for row in found["decisions"]["AllReduce"]}


def configs(shell: Shell, artifact: object) -> set[str | None]:
    return {row["config"] for row in decisions(shell, artifact).values()}


EXPORT: Final = ("dynamiccl-deploy", "export")


def test_hidden_calls_get_fewest_channels(policy: Path, shell: Shell, tmp_path: Path) -> None:
    assert shell(*EXPORT, policy, "--out", "plain").code == 0
    assert configs(shell, "plain") == {"Ring/Simple/24ch"}
    done = shell(*EXPORT, policy, "--out", "a", "--slack", "5%", "--hidden", "all")
    assert done.code == 0, done.err
    assert "mode adaptive knows no slack" in done.err
    assert not (tmp_path / "a" / "brain.pt").exists()
    for name in ("search", "autoccl"):
        with pytest.raises(UserError, match=r"a has slack 0\.05 on all calls, which no search"):
            POLICIES[name](open_artifact(Path("a")))
    for row in decisions(shell, "a").values():
        assert (row["config"], row["channels"], row["own_channels"]) == ("Ring/LL/4ch", 4, 16)
    open_artifact(Path("a"))
    for said in (done.out, shell("dynamiccl-deploy", "explain", "a").out):
        assert "said of the step here, not of the call" in said
        assert "A/B" in said
    found = shell("dynamiccl-deploy", "explain", "a", "--json").json
    slack = {"share": 0.05, "hidden": "all", "max_channels": None, "job": [], "sm_price": 0}
    assert found["slack"] == slack
    played = shell("dynamiccl-evaluate", "simulate", "--policy", "a", "--out", "o")
    assert "which simulated jobs do not keep to" in refused(played, 2)


def test_a_loss_counts_with_its_spread(shell: Shell, tmp_path: Path) -> None:
    for slack, spread, chosen in (
        ("0.12", 0.01, "Ring/LL/2ch"),
        ("5%", 0.02, None),
        ("1%", 0.001, None),
        # A network tells no spread: the 2 % of 4 channels count with the noise band of 1 %.
        ("2.5%", None, None),
        ("5%", None, "Ring/LL/4ch"),
    ):
        case = f"{slack}-{spread}"
        made = make_policy(tmp_path / case, frame(*rows("trained", 1)), spread)
        asked = ("--out", f"a{case}", "--slack", slack, "--hidden", "all")
        assert shell(*EXPORT, made, *asked).code == 0
        assert configs(shell, f"a{case}") == {chosen}, case


def test_an_exposed_bin_between_two_does_not_pass(policy: Path) -> None:
    """It wants the same config, which passed at both for a loss below the slack."""
    [support] = table_supports(Manifest.read(policy))
    own: dict[str, Any] = {"action": 2, "config": "Ring/LL/4ch", "channels": 4, "own_channels": 16}
    cells = [replace(cell, **own) for cell in abstaining_cells(support)[:3]]
    passed: dict[str, Any] = {"verdict": Verdict.PASSED, "runs": 3, "slack": 0.05}
    for slack, verdict in (
        (0.05, Verdict.INFERRED),
        (0.04, Verdict.REFUSED),  # as where the step's time is the objective: cell by cell
        (None, Verdict.REFUSED),
    ):
        asked = replace(cells[1], verdict=Verdict.REFUSED, slack=slack)
        run = [replace(cells[0], **passed), asked, replace(cells[2], **passed)]
        told: Any = SimpleNamespace(one_default=lambda *_: True)
        found = let_bins_between_pass(run, {cells[0].place[:3]: support}, told)
        assert found[1].verdict is verdict
    assert found[1].reason == "its neighbours may lose the slack, and it may not"


def test_calls_tell_which_tasks_compute_hides(policy: Path, shell: Shell, tmp_path: Path) -> None:
    """Traces do not tell the nodes: eight ranks are taken to lie on one, as the policy's do."""
    data = calls_of(
        tmp_path / "calls",
        *(traced(i, size_bytes=1 << 20, exposed_us=4.0 + i) for i in range(3)),
        *(traced(i, size_bytes=1 << 21, exposed_us=6.0) for i in range(3)),
        traced(9, size_bytes=1 << 22, exposed_us=None),
        traced(10, size_bytes=1 << 23, num_ranks=16, exposed_us=0.0),
    )
    done = shell(*EXPORT, policy, "--out", "a", "--slack", "5%", "--hidden", data)
    assert "compute hides 1 of 3 tasks" in done.err
    assert "1 without exposed times are taken as exposed, and so are 1 calls" in done.err
    [hidden] = [row for row in decisions(shell, "a").values() if row["config"] == "Ring/LL/4ch"]
    assert hidden["size_bytes"] == pytest.approx(1 << 20, rel=0.1)
    assert configs(shell, "a") == {"Ring/LL/4ch", "Ring/Simple/24ch"}


def beside_rows(*sizes: int) -> Iterator[dict[str, Any]]:
    """What products of one edge lose to calls of 2, 4 and NCCL's own 16 channels."""
    beside = {"interference_kind": "matmul", "interference_level": 4096.0, "sweep": "beside"}
    for size in sizes:
        for repeat in range(3):
            where = {**beside, "size_bytes": size, "repeat": repeat, "run": f"beside-{repeat}"}
            lost = 12.0 + 0.3 * repeat
            yield default(100.0, actual_num_channels=16, compute_loss_us=lost, **where)
            for channels, loss_us in ((2, 2.9), (4, 3.0)):
                told = {"actual_num_channels": channels, "compute_loss_us": loss_us + 0.1 * repeat}
                yield forced("Ring", "LL", 100.0, channels=channels, **told, **where)


def job_of(folder: Path, beside: Sequence[int] = (1 << 20, 1 << 22)) -> Path:
    """Calls with three times their time of compute beside them, none, no room, and no rows."""
    measured = [*beside_rows(*beside), *rows("alone", 1)]
    store.write_part(folder, measurements_table(measured), provenance={})
    ratios = {20: 3.0, 21: 0.0, 22: 1.0, 24: 3.0}
    calls = [traced(k, size_bytes=1 << k, compute_ratio=ratio) for k, ratio in ratios.items()]
    return calls_of(folder, *calls, traced(9, size_bytes=1 << 23, compute_ratio=None))


JOB: Final = ("--objective", "job", "--hidden", "job")


def test_the_job_gets_a_short_step(policy: Path, fresh: Path, shell: Shell, tmp_path: Path) -> None:
    job_of(tmp_path / "job")
    done = shell(*EXPORT, policy, "--out", "a", *JOB)
    assert done.code == 0, done.err
    said = "of 2 of the job's 5 tasks it is known what compute loses to them"
    assert said in done.err
    assert "1 that compute waits for, 1 of which the traces do not tell" in done.err
    assert "the time of the step, by 2 tasks of a job" in done.out
    found = decisions(shell, "a")
    assert {power: found[size_bin(1 << power)]["config"] for power in range(20, 25)} == {
        20: "Ring/LL/4ch",  # compute gets back more than the call takes longer
        21: "Ring/Simple/24ch",  # compute waits for it: the fastest
        22: None,  # nothing takes fewer channels and no longer, and there is no room
        23: "Ring/Simple/24ch",
        24: "Ring/Simple/24ch",
    }
    open_artifact(Path("a"))
    gated = ("dynamiccl-evaluate", "gate", "--policy", policy, "--data", fresh, "--out", "g")
    found = json.loads(shell(*gated, *JOB, "--json").out)
    assert "slower than NCCL's own choice by less than what the compute beside it" in found["test"]
    [cell] = [each for each in found["cells"] if each["config"] == "Ring/LL/4ch"]
    # 4 % longer it takes 1.04 x 0.7 x 3.1 % of the time from compute, and NCCL's 0.7 x 12.3 %.
    assert cell["slack"] == pytest.approx(1.0, abs=0.01)
    assert cell["verdict"] == "passed"
    assert shell(*EXPORT, "g", "--out", "b").code == 0
    assert "Ring/LL/4ch" in configs(shell, "b")


def test_a_price_within_the_slack(policy: Path, fresh: Path, shell: Shell, tmp_path: Path) -> None:
    """However dear a channel may be: 2 channels take 8 % longer, 4 take 2 % (surely 4 %)."""
    job_of(tmp_path / "job", beside=[])
    asked = (*JOB, "--sm-price", 3)
    for slack, config in (("5%", "Ring/LL/4ch"), ("12%", "Ring/LL/2ch"), ("1%", None)):
        out = f"a{slack}"
        done = shell(*EXPORT, policy, "--out", out, *asked, "--slack", slack)
        assert done.code == 0, done.err
        assert "of 0 of the job's 5 tasks it is known what compute loses to them, of 3" in done.err
        found = decisions(shell, out)
        # Compute goes on for three calls' time; of 4 MiB it ends with the call, and has no room.
        assert [found[size_bin(1 << n)]["config"] for n in (20, 22, 24)] == [config, None, config]
        assert found[size_bin(1 << 21)]["config"] == "Ring/Simple/24ch"
    gated = ("dynamiccl-evaluate", "gate", "--policy", policy, "--data", fresh, "--out", "g")
    found = json.loads(shell(*gated, *asked, "--slack", "5%", "--json").out)
    slacks = [each["slack"] for each in found["cells"] if each["config"] == "Ring/LL/4ch"]
    assert slacks == pytest.approx([0.05] * len(slacks))
    free = shell(*EXPORT, policy, "--out", "b", *JOB, "--sm-price", 0)
    assert "or add --sm-price 0.3 --slack 5%" in refused(free, 3)


def test_slack_is_of_fresh_numbers(policy: Path, fresh: Path, shell: Shell, tmp_path: Path) -> None:
    """What compute gets back from 4 channels in place of 16 is nothing that 8 give back."""
    job_of(tmp_path / "job")
    more = pl.when(pl.col("actual_num_channels") == 4).then(8).otherwise("actual_num_channels")
    rows = store.read(fresh).with_columns(actual_num_channels=more.cast(pl.Int64))
    store.write_part(tmp_path / "more", measurements_table(rows.to_dicts()), provenance={})
    gated = ("dynamiccl-evaluate", "gate", "--policy", policy, "--data", "more", "--out", "g")
    found = json.loads(shell(*gated, *JOB, "--json").out)
    [cell] = [each for each in found["cells"] if each["config"] == "Ring/LL/4ch"]
    assert cell["verdict"] == "refused"
    assert cell["reason"].startswith(
        "its slack is of 4 channels in place of 16, and the fresh runs"
    )


def test_the_objective_job_needs_its_calls(policy: Path, shell: Shell, tmp_path: Path) -> None:
    calls_of(tmp_path / "calls", traced(0, size_bytes=1 << 20, compute_ratio=None))
    beside = measurements_table(list(beside_rows(1 << 20)))
    store.write_part(tmp_path / "calls", beside, provenance={})
    job_of(tmp_path / "job")
    calls_of(tmp_path / "job", traced(30, size_bytes=1 << 20, compute_ratio=3.0, system="other"))
    for asked, said, code in (
        (("--slack", "5%", "--hidden", "nowhere"), "nowhere", 2),
        (("--objective", "job", "--hidden", "calls"), "(not of 1; 0 have none)", 3),
        (JOB, "the calls are of several systems", 2),
    ):
        assert said in refused(shell(*EXPORT, policy, "--out", "a", *asked), code)


def test_no_answer_has_more_channels(policy: Path, shell: Shell, tmp_path: Path) -> None:
    calls_of(tmp_path / "calls", traced(0, exposed_us=100.0))
    for most, slack, chosen, beyond in (
        (8, (), None, 25),  # nothing of 8 or fewer is not slower
        (16, (), None, 0),
        (24, (), "Ring/Simple/24ch", 0),
        (2, ("--slack", "5%", "--hidden", "all"), None, 25),
        (2, ("--slack", "20%", "--hidden", "all"), "Ring/LL/2ch", 0),
        # Nothing is hidden there, and an exposed call may lose nothing.
        (4, ("--slack", "5%", "--hidden", "calls"), None, 25),
    ):
        out = f"a{most}{'-'.join(slack)}"
        done = shell(*EXPORT, policy, "--out", out, "--max-channels", most, *slack)
        assert done.code == 0, done.err
        assert configs(shell, out) == {chosen}
        said = f"in {beyond} or more with more channels than answers may"
        assert (said in done.out) == (beyond > 0)
        [bound] = [
            check
            for check in json.loads(shell("dynamiccl-deploy", "doctor", out, "--json").out)
            if check["name"] == "channels"
        ]
        assert "coll_reg.cc" in bound["advice"]


def test_doctor_says_whether_a_job_has_proved_the_step(policy: Path, shell: Shell) -> None:
    shell(*EXPORT, policy, "--out", "plain", "--max-channels", 24)
    assert "A/B" not in shell("dynamiccl-deploy", "doctor", "plain").out  # no call may lose
    shell(*EXPORT, policy, "--out", "a", "--slack", "5%", "--hidden", "all")
    again = "\n      -> dynamiccl-deploy ab --home DIR -- COMMAND\n"
    said = shell("dynamiccl-deploy", "doctor", "a").out
    assert f"WARN  A/B: not tested by an A/B, and the promise is about the step{again}" in said
    record = {"said": ["step +9.0%"], "created": "2026-11-27T01:02:03Z", "command": ["a b"]}
    more = again.replace("-> ", "-> with more --pairs: ")
    for verdict, status, advice in (
        ("not worse", "ok  ", "\n"),
        ("not told apart", "WARN", more),
        ("worse", "WARN", "\n      -> keep it off: touch a/kill; then export it anew\n"),
    ):
        Path("a/ab.json").write_text(json.dumps(record | {"verdict": verdict}))
        line = f"{status}  A/B: {verdict}: step +9.0%; 2026-11-27, 'a b'{advice}"
        assert line in shell("dynamiccl-deploy", "doctor", "a").out
    open_artifact(Path("a"))
    Path("a/ab.json").write_text("[]")
    assert "not what 'ab' writes" in refused(shell("dynamiccl-deploy", "doctor", "a"), 3)


def test_gate_tests_for_a_loss_below_the_slack(policy: Path, fresh: Path, shell: Shell) -> None:
    gate = ("dynamiccl-evaluate", "gate", "--policy", policy, "--data", fresh)
    asked = ("--slack", "5%", "--hidden", "all")
    done = shell(*gate, *asked, "--out", "gated")
    assert re.match(
        r"The policy may act in \d+ of the \d+ size bins in which it would: in \d+ of them with "
        "fewer channels, slower by less than the slack\ntest of non-inferiority: with fewer ",
        done.out,
    )
    assert "said of the step here, not of the call" in done.err
    found = json.loads(Path("gated/gate.json").read_text())
    assert found["test"].startswith("non-inferiority")
    by_verdict: dict[str, set[int]] = {}
    for cell in found["cells"]:
        by_verdict.setdefault(cell["verdict"], set()).add(cell["bin"])
        assert (cell["channels"], cell["own_channels"], cell["slack"]) == (4, 16, 0.05)
        if cell["verdict"] == "passed":
            assert -0.05 < cell["low"] < 0.0
    slow = {size_bin(size) for size in SIZES if size >= SLOW_FROM}
    assert by_verdict["passed"] == {size_bin(size) for size in SIZES} - slow
    assert slow <= by_verdict["refused"]
    assert "its loss may be as large as the slack" in {c["reason"] for c in found["cells"]}

    assert shell(*EXPORT, "gated", "--out", "a").code == 0
    acting = {b for b, row in decisions(shell, "a").items() if row["config"] is not None}
    assert acting == by_verdict["passed"] | by_verdict.get("inferred", set())
    told = shell(*EXPORT, "gated", "--out", "b", *asked)
    assert told.code == 0, told.err
    other = shell(*EXPORT, "gated", "--out", "c", "--slack", "6%", "--hidden", "all")
    assert "a gate judged the policy for slack 0.05 on all calls" in refused(other, 2)
    gain = shell(*gate, "--out", "for-gain")
    assert "\ntest of gain: faster than NCCL's own choice" in gain.out
    slack = shell(*EXPORT, "for-gain", "--out", "d", *asked)
    assert "a gate judged the policy without slack" in refused(slack, 2)
    blind = SWEEP.replace("sim-4x8", "box").replace("num_nodes = 4", "num_nodes = 1")
    Path("s.toml").write_text("runner = { read_back = false }\n" + blind)
    plan = ("--known", fresh, "--sweep", "s.toml", "--plan", "f.toml")
    said = shell(*gate[:4], *plan, *asked)
    assert (said.code, "has to see how many channels ran" in said.err) == (2, True)


@pytest.mark.parametrize("used", [16, 20, None])
def test_fresh_runs_tell_too(used: int | None, policy: Path, shell: Shell, tmp_path: Path) -> None:
    changed = [
        row | ({"actual_num_channels": used} if row.get("requested_num_channels") == 4 else {})
        for row in rows("fresh", 6)
    ]
    store.write_part(tmp_path / "fresh", measurements_table(changed), provenance={})
    gate = ("dynamiccl-evaluate", "gate", "--policy", policy, "--data", "fresh", "--out", "g")
    shell(*gate, "--slack", "5%", "--hidden", "all")
    found = json.loads(Path("g/gate.json").read_text())
    assert found["counts"]["passed"] == 0
    reasons = {cell["reason"] for cell in found["cells"] if cell["runs"]}
    assert reasons == {
        {
            16: "its gain is not beyond the noise band",
            20: "it took 20 channels, and may take 16",
            None: "its channels, or those of NCCL's own choice, were not read back in the fresh "
            "runs",
        }[used]
    }


def test_explain_shows_channels_beside_time(policy: Path, shell: Shell, tmp_path: Path) -> None:
    shell(*EXPORT, policy, "--out", "a", "--slack", "5%", "--hidden", "all")
    asked = ("--collective", "AllReduce", "--size", "1M", "--group", "1x8")
    done = shell("dynamiccl-evaluate", "explain", "a", *asked)
    assert "channels (NCCL's: 16)" in done.out
    loss = (
        r"acts: predicted \d\.\d % MORE time than NCCL's own choice and 4 channels in place of 16"
    )
    assert re.search(loss, done.out)
    calls = calls_of(tmp_path / "calls", traced(0, exposed_us=1.0, num_nodes=1))
    told = shell("dynamiccl-deploy", "explain", "a", "--calls", calls, "--json").json
    [change] = told["outlook"]["changes"]
    assert (change["channels"], change["own_channels"]) == (4, 16)
    table = ("dynamiccl-deploy", "table", "a", "--group", "1x8")
    assert re.search(r"AllReduce .* Ring/LL/4ch +4 +16", shell(*table).out)


def test_reports_score_it_as_its_tables_act(policy: Path) -> None:
    loaded = TorchPolicy.load(policy)
    measured = frame(*rows("trained", 2))
    catalogue = Catalogue.from_frame(measured)
    grid = task_grid(measured, catalogue, list(Split))
    names = [config.key for config in catalogue.configs]
    for slack, chosen in [(None, "Ring/Simple/24ch"), (Slack(0.05, "all", None), "Ring/LL/4ch")]:
        loaded.manifest = replace(loaded.manifest, slack=slack)
        actions = LearnedPolicy(loaded, catalogue, "p").choose(grid)
        assert {names[a] for a in actions} == {chosen}


def test_channels_must_be_read_back(policy: Path, shell: Shell, tmp_path: Path) -> None:
    old = Path(shutil.copytree(policy, tmp_path / "old"))
    raw = json.loads((old / "manifest.json").read_text())
    for support in raw["supports"]:
        del support["channels"]
    del raw["slack"]
    (old / "manifest.json").write_text(json.dumps(raw))
    asked = ("--slack", "5%", "--hidden", "all")
    assert "not read back" in refused(shell(*EXPORT, old, "--out", "a", *asked), 3)
    assert shell(*EXPORT, old, "--out", "b").code == 0
    [support] = table_supports(Manifest.read(old))
    assert support.channels == {}
