"""Promotes a gated policy to champion: the registered version that jobs are to run.

A candidate is what was trained last; a champion is what a gate let through. So its version is not
the run's own policy but the gate's copy, whose manifest holds it back where nothing was shown.
"""

import re
from dataclasses import dataclass
from pathlib import Path

from dynamiccl.datasets.manifest import MANIFEST_NAME, POLICY_FOLDER, POLICY_NAME, Manifest
from dynamiccl.datasets.store import file_sha256
from dynamiccl.errors import UserError
from dynamiccl.train import tracking


@dataclass(frozen=True, slots=True)
class Promotion:
    """The promoted version."""

    run_id: str
    #: Of the registered model; that of the champion before it, which may be the same.
    version: str
    version_before: str | None
    #: Size bins in which it may act; None: it passed no gate.
    passed_bins: int | None
    #: The policy's folder; its address where the artifacts are not files here.
    policy: str


def promote(named: str, tracking_uri: str, *, gated: Path | None, force: bool) -> Promotion:
    """Let the alias `champion` mean a run's policy, as a gate left it in `gated`.

    `named`: a run id, `models:/dynamiccl@candidate`, or the run's directory. Raises UserError for a
    policy that no gate has judged, that a gate lets do nothing, or that is not the run's; `force`
    takes it for all but the last. Raises as `Manifest.read` too.
    """
    run_id = tracking.find_run(named, tracking_uri) or _run_of_folder(Path(named))
    run = tracking.reopen_run(tracking_uri, run_id)
    own = Manifest.read(tracking.policy_directory(run_id, tracking_uri))
    before = tracking.version_of(tracking_uri, tracking.CHAMPION)
    name, passed = POLICY_FOLDER, None
    if gated is not None:
        passed = _passed_bins(run_id, own, gated)
        # One folder for each verdict: what an earlier version means must not change.
        name = f"gated-{file_sha256(gated / MANIFEST_NAME)[:12]}"
    if not passed and not force:
        raise UserError(_refusal(run_id, gated))
    if gated is not None:
        run.log_folder(gated, name)
    verdict = "forced" if not passed else f"passed {passed} size bins"
    version = tracking.register(tracking_uri, run_id, tracking.CHAMPION, folder=name)
    tracking.tag_version(tracking_uri, version, {"gate": verdict})
    policy = f"{run.artifact_uri}/{name}" if run.directory is None else str(run.directory / name)
    return Promotion(run_id, version, before, passed, policy)


def _run_of_folder(folder: Path) -> str:
    """The MLflow run id of the run directory that contains a folder."""
    ids = re.findall(r"[0-9a-f]{32}", str(folder.resolve()))
    if not ids:
        raise UserError(
            f"{folder} lies in no run's directory, and a champion is a version of a run: give the "
            "run's id, or models:/dynamiccl@candidate"
        )
    return str(ids[-1])


def _passed_bins(run_id: str, own: Manifest, gated: Path) -> int | None:
    """Number of size bins in which the gate lets the policy act; None without a gate."""
    manifest = Manifest.read(gated)
    if manifest.files.get(POLICY_NAME) != own.files.get(POLICY_NAME):
        raise UserError(
            f"{gated} is not about the policy of run '{run_id}': their {POLICY_NAME} differ; give "
            "the run that the gate judged"
        )
    verdicts = [support.gated for support in manifest.supports]
    if None in verdicts:
        return None
    by_action = [bins for v in verdicts if v for bins in v.values()]
    return sum(len(bins) for actions in by_action for bins in actions.values())


def _refusal(run_id: str, gated: Path | None) -> str:
    if gated is None:
        return (
            f"the champion is what a gate let through: measure fresh runs, judge run '{run_id}' by "
            f"'dynamiccl-evaluate gate --data FRESH --policy {run_id} --out DIR', and give --gated "
            "DIR; or --force for a policy that nothing keeps from being slower than NCCL"
        )
    return (
        f"no gate let the policy of {gated} act in any size bin: as a champion it would leave all "
        "to NCCL; judge it on more fresh runs, or give --force"
    )
