"""`dynamiccl-deploy export` and `bind`: making artifacts, and the machines that they act on."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Final

import numpy as np
import numpy.typing as npt
import typer

from dynamiccl import cli
from dynamiccl.datasets import manifest as manifests
from dynamiccl.datasets import objective as terms
from dynamiccl.datasets import questions
from dynamiccl.datasets.features import HISTORY_SLICE, Observations
from dynamiccl.datasets.history import UNKNOWN, WINDOW_LENGTH, CallColumns, history_features
from dynamiccl.datasets.manifest import Manifest, Slack, Support
from dynamiccl.datasets.questions import ActingPolicy, ColdQuestions
from dynamiccl.doctor import Machine
from dynamiccl.errors import ArtifactMismatch, UnknownName, UserError
from dynamiccl.files import WRITING, clear_leftovers
from dynamiccl.nccl import MAX_CHANNELS, Algorithm, Protocol
from dynamiccl.serve.artifact import (
    Artifact,
    ArtifactDir,
    Nccl,
    PluginIndex,
    check_features,
    open_artifact,
    warn,
)
from dynamiccl.serve.brain import BrainConfig, History, ScriptedBrain, columns_of
from dynamiccl.serve.build import find_plugin, own_fingerprint
from dynamiccl.serve.table import DecisionTable, relative_path
from dynamiccl.train import tracking_uri
from dynamiccl.train.options import Json, folding_table, stderr, stdout, tell

#: Share of decisions in which a brain may differ: floats of other libraries round differently where
#: two configs are predicted equally fast. The artifact's table counts.
NEAR_TIES: Final = 0.01
#: Histories of a shape on which brain and policy are compared.
_WINDOWS: Final = 128


def export_artifact(
    policy_dir: Path,
    out: Path,
    trigger: Path | None = None,
    groups: Sequence[tuple[int, int]] = (),
    slack: Slack | None = None,
) -> Artifact:
    """Copy a trained policy to `out`, add tables and brain; return the artifact.

    `trigger`: a `trigger.pt` in place of the policy's. `groups`: shapes (nodes, ranks a node) that
    nobody measured. `slack`: None is the policy's; with slack there is no brain, which would choose
    what is fastest. Raises UserError where `out` holds something, CorruptFile for a trigger without
    facts, and what `Manifest.read` and `with_shape` raise.
    """
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out} is not empty; take another --out or remove it")
    manifest = Manifest.read(policy_dir)
    check_features(manifest, policy_dir)
    manifest = replace(manifest, slack=slack or manifest.slack)
    for group in groups:
        manifest = manifests.with_shape(manifest, *group)
    if trigger is not None:
        manifest = replace(manifest, trigger=manifests.trigger_facts(trigger))
    elif (policy_dir / manifests.TRIGGER_NAME).is_file():
        trigger = policy_dir / manifests.TRIGGER_NAME
    supports = questions.table_supports(manifest)
    if not supports:
        raise UserError(
            f"the policy of {policy_dir} knows no communicator shape in launch profile 'default': "
            "there is nothing to make a table for"
        )
    place = out.absolute()
    place.parent.mkdir(parents=True, exist_ok=True)
    clear_leftovers(place.parent)
    # A full disk, or what is refused, leaves nothing at `out`.
    with TemporaryDirectory(prefix=WRITING, dir=place.parent) as folder:
        staged = Path(folder, place.name)
        staged.mkdir()
        _build(staged, policy_dir, manifest, supports, trigger)
        artifact = open_artifact(staged)
        staged.rename(place)  # also where an empty directory is
    return replace(artifact, directory=out)


def _build(
    out: Path,
    policy_dir: Path,
    manifest: Manifest,
    supports: Sequence[Support],
    trigger: Path | None,
) -> None:
    from dynamiccl.serve.brain_module import write_brain
    from dynamiccl.train.policy import TorchPolicy, load_script

    for name in (manifests.POLICY_NAME, manifests.GATE_NAME):
        if (policy_dir / name).is_file():
            shutil.copyfile(policy_dir / name, out / name)
    policy, tables = TorchPolicy(load_script(out / manifests.POLICY_NAME), manifest), []
    for support in supports:
        path = out / relative_path(support.system, support.num_nodes, support.num_ranks)
        path.parent.mkdir(parents=True, exist_ok=True)
        tables.append(make_table(policy, manifest, support))
        path.write_bytes(tables[-1].to_bytes())
    if manifest.slack is None:
        cold = [questions.cold_questions(manifest, support) for support in supports]
        configs = manifest.actions().configs
        write_brain(out / manifests.POLICY_NAME, configs, cold, out / manifests.BRAIN_NAME, trigger)
        brain = ScriptedBrain(out / manifests.BRAIN_NAME)
        for table, asked in zip(tables, cold, strict=True):
            check_brain(brain, policy, table, asked)
    manifest.write(out)
    PluginIndex.of_artifact(out, supports).write(out)


def make_table(policy: ActingPolicy, manifest: Manifest, support: Support) -> DecisionTable:
    """What a policy decides without a history."""
    asked = questions.cold_questions(manifest, support)
    actions = questions.decide(policy, Observations.cold(asked.context), asked.mask, asked.rule)
    configs = manifest.actions().configs
    chosen = [configs[action] for action in actions]
    rows = [chosen[i : i + asked.num_bins] for i in range(0, len(chosen), asked.num_bins)]
    return DecisionTable.from_configs(
        rows,
        num_nodes=support.num_nodes,
        num_ranks=support.num_ranks,
        first_bin=asked.first_bin,
    )


def check_brain(
    brain: ScriptedBrain, policy: ActingPolicy, table: DecisionTable, asked: ColdQuestions
) -> None:
    """Raise ArtifactMismatch where a brain decides otherwise than table and policy."""
    shape = asked.support
    asks = BrainConfig(shape.system, shape.num_nodes, shape.num_ranks)
    cold = brain.decide(asks, History((), None))
    random = np.random.default_rng(0)
    rows = random.integers(len(asked.context), size=_WINDOWS)
    calls, is_valid = _random_calls(random)
    context, mask = asked.context[rows], asked.mask[rows]
    actions = brain.act(columns_of(calls, is_valid), context, mask)
    window, context[:, HISTORY_SLICE] = history_features(calls, is_valid)
    wanted = questions.decide(policy, Observations(window, context), mask)
    for where, differs in (
        ("without a history", cold is None or cold.entries != table.entries),
        ("on a history", actions != wanted),
    ):
        share = np.mean(differs)
        if share > NEAR_TIES:
            raise ArtifactMismatch(
                f"for {shape.num_ranks} ranks on {shape.num_nodes} nodes and {where} brain.pt does "
                f"not decide what policy.pt does ({share:.0%} differ); export again"
            )


def _random_calls(random: np.random.Generator) -> tuple[CallColumns, npt.NDArray[np.bool_]]:
    """Windows (N, K) of 0 to K calls, of which some facts are unknown, and which are there."""
    shape = _WINDOWS, WINDOW_LENGTH
    lengths = random.integers(WINDOW_LENGTH + 1, size=(_WINDOWS, 1))
    skew_us, interference = np.exp2(random.uniform(-3, 14, shape)), random.uniform(0, 3, shape)
    calls = CallColumns(
        size_bytes=np.exp2(random.uniform(3, 34, shape)).astype(np.int64),
        time_us=np.exp2(random.uniform(0, 20, shape)),
        algorithm=random.integers(UNKNOWN, len(Algorithm), shape),
        protocol=random.integers(UNKNOWN, len(Protocol), shape),
        num_channels=random.integers(MAX_CHANNELS + 1, size=shape),
        interference=np.where(random.random(shape) < 0.8, interference, UNKNOWN),
        skew_us=np.where(random.random(shape) < 0.8, skew_us, UNKNOWN),
    )
    return calls, np.arange(WINDOW_LENGTH) >= WINDOW_LENGTH - lengths


def export_command(
    run: Annotated[
        str, typer.Argument(metavar="RUN", help="Run id, models:/dynamiccl@champion, directory.")
    ],
    out: Annotated[Path, typer.Option(help="New artifact directory.")],
    trigger: Annotated[
        str | None,
        typer.Option(metavar="RUN", help="Run of dynamiccl-train trigger that goes into it."),
    ] = None,
    group: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NODESxRANKS",
            help="Also make a table for this group shape without measurements; repeatable.",
        ),
    ] = None,
    slack: terms.SlackShare = None,
    hidden: terms.Hidden = None,
    max_channels: terms.MaxChannels = None,
    objective: terms.Objective = "call",
    sm_price: terms.SmPrice = 0.0,
    as_json: Json = False,
) -> None:
    """Copy a run's policy and add its decision tables.

    With --slack, calls that compute hides get the fewest channels within that share of time, and
    never more than NCCL's own choice takes: never slower is said of the step then, not of the call.
    With --objective job they get what surely shortens the step most, by the job's traces and a
    sweep beside matrix products (kind matmul), both in --hidden DATA, or --sm-price and --slack.

    Example: dynamiccl-deploy export RUN_ID --out out/artifact
    Example: dynamiccl-deploy export RUN_ID --out out/artifact --slack 5% --hidden data
    Example: dynamiccl-deploy export RUN_ID --out out/artifact --objective job --hidden data
    """
    groups = [cli.parse_group(text) for text in group or []]
    with cli.working("making tables and brain, and checking them"):
        policy = _find_policy(run)
        watching = None if trigger is None else _find_trigger(trigger)
        known = Manifest.read_unchecked(policy)
        wanted, notes = terms.slack_of(known, slack, hidden, max_channels, objective, sm_price)
        artifact = export_artifact(policy, out, watching, groups, wanted)
    if wanted is not None:
        notes.append("there is no brain.pt: mode adaptive knows no slack, so use mode table")
    for note in notes:
        tell(stderr, note)
    if watching is not None and known.trigger is None:
        warn(
            "this policy was trained without a Trigger: interference levels are something that it "
            "has never seen, and what it makes of them was never learned"
        )
    if not artifact.is_gated:
        warn(
            "this policy passed no gate: nothing but its own margin keeps it from being slower "
            "than NCCL; measure fresh runs and use 'dynamiccl-evaluate gate' before jobs run "
            "under it"
        )
    carried = [f"{s.num_nodes}x{s.ranks_per_node}" for s in artifact.manifest.supports if s.carried]
    if carried:
        warn(
            f"nothing was measured on {', '.join(carried)}: those tables rest on other shapes and "
            "on NCCL's own costs; measure a few sizes there before jobs rely on them"
        )
    _show(artifact, as_json=as_json)


def _find_policy(run: str) -> Path:
    """The policy of a run, `models:/` name or directory (which needs no MLflow)."""
    found = manifests.find_policy_in(Path(run.removeprefix("file://")))
    if found is not None:
        return found
    from dynamiccl.train.tracking import policy_directory

    return policy_directory(run, tracking_uri())


def _find_trigger(run: str) -> Path:
    folder = Path(run.removeprefix("file://"))
    if not folder.exists():
        from dynamiccl.train.tracking import run_directory

        folder = run_directory(run, tracking_uri())
    return manifests.trigger_file(folder)


def _show(artifact: Artifact, *, as_json: bool) -> None:
    if as_json:
        cli.print_json(artifact.to_json())
        return
    for what, advice in artifact.warnings:
        warn(f"{what}; {advice}")
    table = folding_table("system", "nodes", "ranks", "entries", "acting", "table")
    for info in artifact.tables:
        counts = (info.num_nodes, info.num_ranks, info.entries, info.acting)
        table.add_row(info.system, *map(str, counts), info.path)
    stdout.print(table)
    stdout.print(f"{artifact.directory}: exported; {artifact.in_short}", soft_wrap=True)


def bind_command(
    artifact: ArtifactDir,
    system: Annotated[str | None, typer.Option(help="The system; may be left out if one.")] = None,
    fingerprint: Annotated[
        str | None, typer.Option(help="The machine; default: the one that this runs on.")
    ] = None,
    nccl: Nccl = None,
    plugin: Annotated[
        Path | None, typer.Option(help="The built plugin; default out/plugin.")
    ] = None,
) -> None:
    """Let an artifact's tables act on a kind of machine that its data do not name.

    Without a known fingerprint the plugin abstains: data that were imported or simulated say
    nothing of the machine. Bind only machines like the one that was measured. The artifact's hash
    changes: install it again wherever it is used.

    Example: dynamiccl-deploy bind out/artifact --system h100-ib-simulated
    """
    opened = open_artifact(artifact)
    names = opened.index.system_names
    chosen = system or (names[0] if len(names) == 1 else "")
    if chosen not in names:
        raise UnknownName("system", chosen or "(none given)", names, where="--system")
    machine = fingerprint or own_fingerprint(Machine(), find_plugin(plugin), nccl)
    before = opened.index.systems.get(machine)
    index = opened.index.bound(chosen, machine)
    index.write(artifact)
    moved = f", no longer to {before}" if before not in {None, chosen} else ""
    tell(stdout, f"{machine}: belongs to {chosen}{moved}\n{artifact}: now {index.sha256}")
