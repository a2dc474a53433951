"""Why a policy acts or abstains for one message size of one communicator."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.manifest import INDEX_NAME, Support
from dynamiccl.datasets.questions import (
    REACH_BINS,
    allowed,
    cold_questions,
    count_of,
    decide,
    table_supports,
)
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.evaluate.gate.gated import read_gated
from dynamiccl.evaluate.page import percent, saved_text, say
from dynamiccl.nccl import Collective, Config, NcclVersion, invalid_reason
from dynamiccl.serve.artifact import acts_nowhere
from dynamiccl.sizes import bin_first_byte, size_bin, size_label
from dynamiccl.train.commands.options import folding_table, wide_stdout
from dynamiccl.train.policy import TorchPolicy

_ROWS: Final = 15
#: Times NCCL's own from which on a prediction only says that it is not to be chosen.
_FAR_SLOWER: Final = 10.0


@dataclass(frozen=True, slots=True)
class Query:
    """One message size of one communicator; `system` is needed where several have this shape."""

    collective: Collective
    size_bytes: int
    num_nodes: int
    num_ranks: int
    system: str | None = None


def explain(policy_dir: Path, asked: Query) -> dict[str, Any]:
    """What a policy directory says of one message size; raises UserError and UnknownName.

    It is asked at the middle of the size's bin, as for a decision table: `first_byte` and
    `last_byte` have the same answer. `predictions`, the fastest config first, hold its time over
    that under NCCL's own choice, its channels as read back (null: not known), and why it may not be
    chosen; `margin` and `noise_band` are fractions; `gate` is what the gate made of the size (null:
    no gate judged the policy), `reason` a sentence
    (explain.words.jinja), `warnings` why its tables act nowhere, each with what to do.
    """
    policy = TorchPolicy.load(policy_dir)
    support = _support(policy, asked)
    index = size_bin(asked.size_bytes)
    if index < 0 or not asked.collective.tunable:
        what = asked.collective.wire if index >= 0 else f"a message of {asked.size_bytes} bytes"
        raise UserError(f"NCCL never asks a tuner about {what}")
    manifest = policy.manifest
    free = cold_questions(manifest, replace(support, gated=None), [asked.collective], [index])
    observations = Observations.cold(free.context)
    times = -policy.values(observations, np.ones_like(free.mask))[0]
    ratios = times / times[ABSTAIN_ACTION]
    held = allowed(manifest, support, asked.collective, [index])
    wanted = int(decide(policy, observations, free.mask, free.rule)[0])
    chosen = int(decide(policy, observations, held, free.rule)[0])
    configs = manifest.actions().configs
    used = [count_of(each) for each in free.rule.channels[0]]
    found = [
        {
            "config": configs[action].key,
            "time_over_default": float(ratios[action]),
            "channels": used[action],
            "not_allowed": _why_not(support, asked, configs[action], action, index),
        }
        for action in np.argsort(ratios, kind="stable").tolist()
        if action != ABSTAIN_ACTION
    ]
    place = (support.system, support.num_nodes, support.num_ranks, asked.collective.wire, index)
    gated = read_gated(policy_dir)
    cells = [] if gated is None else [cell for cell in gated.cells if cell.place == place]
    answer = {
        "system": support.system,
        "first_byte": bin_first_byte(index),
        "last_byte": bin_first_byte(index + 1) - 1,
        "predictions": found,
        "chosen": configs[chosen].key,
        "own_channels": used[ABSTAIN_ACTION],
        "margin": manifest.abstain_margin,
        "noise_band": support.noise_bands.get(asked.collective.wire),
        "gate": asdict(cells[0]) if cells else None,
    }
    slack = manifest.slack if free.rule.counts[0] else None
    if chosen != ABSTAIN_ACTION and (used[chosen] or 0) >= (used[ABSTAIN_ACTION] or 0):
        slack = None
    facts = {
        "chosen": chosen != ABSTAIN_ACTION,
        "wanted": None if wanted == ABSTAIN_ACTION else configs[wanted].key,
        "gain": 1.0 / ratios[chosen] - 1.0,
        "channels": used[chosen],
        "own_channels": used[ABSTAIN_ACTION],
        "promise": slack and slack.promise,
        "gate_reason": cells[0].reason if cells else "",
    }
    if chosen == wanted == ABSTAIN_ACTION:
        facts |= _best(policy, observations, answer)
    # A run has no index, and nothing to bind.
    has_index = (policy_dir / INDEX_NAME).is_file()
    nowhere = acts_nowhere(policy_dir, support.system) if has_index else []
    reason = say("explain", "reason", facts)
    return {**answer, "reason": reason, "warnings": nowhere}


def _support(policy: TorchPolicy, asked: Query) -> Support:
    supports = table_supports(policy.manifest)
    same = [s for s in supports if (s.num_nodes, s.num_ranks) == (asked.num_nodes, asked.num_ranks)]
    if not same:
        raise UnknownName(
            "communicator",
            f"--nodes {asked.num_nodes} --ranks {asked.num_ranks}",
            sorted({f"--nodes {s.num_nodes} --ranks {s.num_ranks}" for s in supports}),
            where="the policy (of others it knows nothing, and abstains)",
        )
    names = [s.system for s in same]
    named = [s for s in same if asked.system in {None, s.system}]
    if not named or len(named) > 1:
        raise UnknownName("system", asked.system, names, where="--system")
    return named[0]


def _why_not(support: Support, asked: Query, config: Config, action: int, index: int) -> str:
    version = NcclVersion.parse(support.nccl_version) if support.nccl_version else None
    reason = invalid_reason(config, asked.collective, version=version, num_nodes=support.num_nodes)
    if reason is not None:
        return reason
    if (config.num_channels or 0) > (support.most_channels or 0):
        return f"more channels than NCCL was seen to use ({support.most_channels})"
    measured = support.measured.get(asked.collective.wire, {})
    for name, what in ((str(action), "it"), (str(ABSTAIN_ACTION), "NCCL's own choice")):
        bins = measured.get(name, [])
        if not bins or min(abs(each - index) for each in bins) > REACH_BINS:
            return f"{what} was not measured within an octave"
    return ""


def _best(
    policy: TorchPolicy, observations: Observations, answer: dict[str, Any]
) -> dict[str, Any]:
    """The best config that may be chosen, and the gain that it would need."""
    able = [each for each in answer["predictions"] if not each["not_allowed"]]
    if not able:
        return {"best": None}
    best = able[0]["config"]
    action = [config.key for config in policy.manifest.actions().configs].index(best)
    least = policy.least_gains(observations)
    needed = float(least[0, action]) if least is not None else answer["noise_band"] or 0.0
    return {
        "best": best,
        "gain": 1.0 / able[0]["time_over_default"] - 1.0,
        "needed": max(answer["margin"], needed),
        "spreads": least is not None,
    }


def show(found: dict[str, Any], asked: Query) -> None:
    """Print what `explain` found: a table, and why."""
    shape = f"{asked.num_ranks} ranks on {asked.num_nodes} nodes of {found['system']}"
    title = f"{asked.collective.wire} of {size_label(asked.size_bytes)}, {shape}"
    own = "not read back" if found["own_channels"] is None else str(found["own_channels"])
    heads = ("config", "predicted time saved, %", f"channels (NCCL's: {own})", "may be chosen")
    same = f"(the same from {found['first_byte']} to {found['last_byte']} bytes)"
    table = folding_table(*heads, title=f"{title} {same}")
    # What it takes is among the fastest, or is NCCL's own choice.
    for each in found["predictions"][:_ROWS]:
        used = "-" if each["channels"] is None else str(each["channels"])
        ratio = each["time_over_default"]
        saved = saved_text(1.0 - ratio) if ratio < _FAR_SLOWER else "far slower"
        table.add_row(each["config"], saved, used, each["not_allowed"] or "yes")
    wide = wide_stdout()
    wide.print(table)
    more = len(found["predictions"]) - _ROWS
    band = "unknown" if found["noise_band"] is None else percent(found["noise_band"])
    for line in (
        *([f"and {more} slower ones (--json has all)"] if more > 0 else []),
        f"margin {percent(found['margin'])}, noise band {band}",
        f"gate: {say('explain', 'verdict', found['gate'])}",
        f"{found['chosen']}: {found['reason']}",
        *map("; ".join, found["warnings"]),
    ):
        wide.print(line, soft_wrap=True, highlight=False, markup=False)
