"""Why a policy acts or abstains for one message size of one communicator."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl.datasets import questions
from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.manifest import INDEX_NAME, Support
from dynamiccl.drawn_worlds import Floats
from dynamiccl.errors import UserError
from dynamiccl.evaluate.evidence import place_of
from dynamiccl.evaluate.gate import read_gated
from dynamiccl.evaluate.page import say
from dynamiccl.nccl import Collective, Config
from dynamiccl.serve.artifact import acts_nowhere, check_features, pick_support
from dynamiccl.sizes import bin_center_bytes, bin_first_byte, size_bin, size_label
from dynamiccl.train.policy import TorchPolicy


def explain(
    policy_dir: Path,
    collective: Collective,
    size_bytes: int,
    *,
    num_nodes: int,
    num_ranks: int,
    system: str | None = None,
) -> dict[str, Any]:
    """What a policy directory says of one message size; raises as its parts.

    `system` is needed where several have this shape. The policy is asked at the middle of the
    size's bin, as for a decision table. `predictions`, the fastest config first, hold its time over
    NCCL's own (null: too little was measured to tell), channels as read back, and why it may not be
    chosen; `margin` and `noise_band` are
    fractions; `gate` is what the gate made of the size (null: none judged the policy), `reason` a
    sentence, `warnings` why its tables act nowhere, each with what to do.
    """
    policy = TorchPolicy.load(policy_dir)
    manifest = policy.manifest
    check_features(manifest, policy_dir)
    support = pick_support(manifest, num_nodes, num_ranks, system)
    index = size_bin(size_bytes)
    if index < 0 or not collective.tunable:
        what = collective.wire if index >= 0 else f"a message of {size_bytes} bytes"
        raise UserError(f"NCCL never asks a tuner about {what}")
    free = questions.cold_questions(manifest, replace(support, gated=None), [collective], [index])
    observations = Observations.cold(free.context)
    ratios, spreads = policy.believed(observations)[0], policy.least_gains(observations)
    unsure = np.zeros(len(ratios), dtype=np.bool_) if spreads is None else np.isinf(spreads[0])
    held = questions.allowed(manifest, support, collective, [index])
    wanted = int(questions.decide(policy, observations, free.mask, free.rule)[0])
    chosen = int(questions.decide(policy, observations, held, free.rule)[0])
    configs = manifest.actions().configs
    used = [questions.count_of(each) for each in free.rule.channels[0]]
    found = [
        {
            "config": configs[action].key,
            "time_over_default": None if np.isnan(ratios[action]) else float(ratios[action]),
            "channels": used[action],
            "not_allowed": _why_not(support, collective, configs[action], action, index)
            or _why_unsure(ratios, action, is_unsure=bool(unsure[action])),
        }
        for action in np.argsort(ratios, kind="stable").tolist()
        if action != ABSTAIN_ACTION
    ]
    key = (*place_of(support), collective.wire, index)
    gated = read_gated(policy_dir)
    judged = [cell for cell in gated.cells if cell.key == key] if gated else []
    band = support.noise_bands.get(collective.wire)
    facts = {
        "chosen": chosen != ABSTAIN_ACTION,
        "wanted": None if wanted == ABSTAIN_ACTION else configs[wanted].key,
        "gain": 1.0 / ratios[chosen] - 1.0,
        "channels": used[chosen],
        "own_channels": used[ABSTAIN_ACTION],
        "promise": None,
        "gate_reason": judged[0].reason if judged else "",
    }
    fewer = (used[chosen] or 0) < (used[ABSTAIN_ACTION] or 0)
    if manifest.slack and free.rule.counts[0] and (fewer or chosen == ABSTAIN_ACTION):
        facts["promise"] = manifest.slack.promise
    if chosen == wanted == ABSTAIN_ACTION:
        # The best config that may be chosen, and the gain that it would need.
        able = [each for each in found if not each["not_allowed"]]
        facts["best"] = able[0]["config"] if able else None
        if able:
            best = [config.key for config in configs].index(facts["best"])
            needed = band or 0.0 if spreads is None else float(spreads[0, best])
            facts["gain"] = 1.0 / ratios[best] - 1.0
            facts["needed"] = max(manifest.abstain_margin, needed)
            facts["spreads"] = spreads is not None
    return {
        "system": support.system,
        "collective": collective.wire,
        "size_bytes": size_bytes,
        "num_nodes": num_nodes,
        "num_ranks": num_ranks,
        "first_byte": bin_first_byte(index),
        "last_byte": bin_first_byte(index + 1) - 1,
        "predictions": found,
        "chosen": configs[chosen].key,
        "own_channels": used[ABSTAIN_ACTION],
        "margin": manifest.abstain_margin,
        "noise_band": band,
        "gate": asdict(judged[0]) if judged else None,
        "reason": say("explain", "reason", facts),
        # A run has no index.
        "warnings": acts_nowhere(policy_dir, support.system)
        if (policy_dir / INDEX_NAME).is_file()
        else [],
    }


def _why_not(
    support: Support, collective: Collective, config: Config, action: int, index: int
) -> str:
    if reason := questions.why_not(support, collective, config):
        return reason
    if index >= support.refused_from(collective.wire, action):
        first = size_label(bin_center_bytes(support.failed[collective.wire][str(action)]))
        return f"it failed, or computed wrong values: in no table from {first} on"
    measured = support.measured.get(collective.wire, {})
    for name, what in ((str(action), "it"), (str(ABSTAIN_ACTION), "NCCL's own choice")):
        bins = measured.get(name, [])
        if not bins or min(abs(each - index) for each in bins) > questions.REACH_BINS:
            return f"{what} was not measured within an octave"
    return ""


def _why_unsure(ratios: Floats, action: int, *, is_unsure: bool) -> str:
    """Why a policy that tells spreads takes no gain of a config for sure."""
    if np.isnan(ratios[ABSTAIN_ACTION]):
        return "the training data lack NCCL's own choice within an octave below or above"
    if np.isnan(ratios[action]):
        return "the training data lack it within an octave"
    return "no gain is sure enough at the sizes around" if is_unsure else ""
