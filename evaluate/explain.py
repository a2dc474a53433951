"""Why a policy acts or abstains for one message size of one communicator."""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from dynamiccl.datasets.actions import ABSTAIN_ACTION
from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.manifest import Support
from dynamiccl.datasets.questions import (
    REACH_BINS,
    allowed,
    cold_questions,
    count_of,
    decide,
    table_supports,
)
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.evaluate.gate.cells import Cell, Verdict
from dynamiccl.evaluate.gate.gated import read_gated
from dynamiccl.nccl import Collective, Config, NcclVersion, invalid_reason
from dynamiccl.sizes import bin_first_byte, size_bin
from dynamiccl.train.policy import TorchPolicy


@dataclass(frozen=True, slots=True)
class Query:
    """One message size of one communicator; `system` is needed where several have this shape."""

    collective: Collective
    size_bytes: int
    num_nodes: int
    num_ranks: int
    system: str | None = None


@dataclass(frozen=True, slots=True)
class Prediction:
    """The policy's prediction for one config."""

    config: str
    #: Predicted time over that under NCCL's own choice.
    time_over_default: float
    #: That it takes, as read back; None: not known.
    channels: int | None
    #: Why it may not be chosen; empty: it may.
    not_allowed: str


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation; gains are fractions of NCCL's own time."""

    system: str
    #: The bytes for which a table would say the same, both included.
    first_byte: int
    last_byte: int
    #: Every config but NCCL's own choice, the fastest first.
    predictions: list[Prediction]
    chosen: str
    #: That NCCL's own choice takes, as read back; None: not known.
    own_channels: int | None
    margin: float
    noise_band: float | None
    #: What the gate made of this size; None: no gate judged the policy.
    gate: Cell | None
    #: Why it acts or abstains, as a sentence.
    reason: str

    def to_json(self) -> dict[str, Any]:
        """The fields as plain data for `json.dumps`."""
        return asdict(self)


def explain(policy_dir: Path, asked: Query) -> Explanation:
    """Query a policy directory about one message size; raises UserError and UnknownName.

    It is evaluated at the middle of the size's bin, as for a decision table.
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
    reasons = [_why_not(support, asked, each, a, index) for a, each in enumerate(configs)]
    found = [
        Prediction(config.key, float(ratios[a]), used[a], reasons[a])
        for a, config in enumerate(configs)
        if a != ABSTAIN_ACTION
    ]
    gate = _gate(policy_dir, support, asked, index)
    answer = Explanation(
        system=support.system,
        first_byte=bin_first_byte(index),
        last_byte=bin_first_byte(index + 1) - 1,
        predictions=sorted(found, key=lambda each: each.time_over_default),
        chosen=configs[chosen].key,
        own_channels=used[ABSTAIN_ACTION],
        margin=manifest.abstain_margin,
        noise_band=support.noise_bands.get(asked.collective.wire),
        gate=gate,
        reason="",
    )
    slack = manifest.slack if free.rule.counts[0] else None
    if chosen != ABSTAIN_ACTION:
        shown = "beyond what it must show"
        if slack is not None and (used[chosen] or 0) < (used[ABSTAIN_ACTION] or 0):
            shown = f"{used[chosen]} channels in place of {used[0]}: {slack.promise}"
        return replace(answer, reason=f"acts: {_gain(ratios[chosen])} and {shown}")
    if wanted != ABSTAIN_ACTION:
        held_back = gate.reason if gate is not None and gate.reason else "it did not pass"
        said = f"abstains: it wants {configs[wanted].key}, and the gate holds it back: {held_back}"
        return replace(answer, reason=said)
    if slack is not None:
        few = "abstains: nothing is known to take fewer channels and surely within the slack"
        return replace(answer, reason=f"{few}: {slack.promise}")
    return replace(answer, reason=_abstains(policy, observations, answer))


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


def _gate(policy_dir: Path, support: Support, asked: Query, index: int) -> Cell | None:
    gated = read_gated(policy_dir)
    if gated is None:
        return None
    place = (support.system, support.num_nodes, support.num_ranks, asked.collective.wire, index)
    return next((cell for cell in gated.cells if cell.place == place), None)


def _gain(ratio: float) -> str:
    return f"predicted {1.0 / ratio - 1.0:+.2%} against NCCL's own choice"


def _abstains(policy: TorchPolicy, observations: Observations, answer: Explanation) -> str:
    """Why no config was chosen."""
    able = [each for each in answer.predictions if not each.not_allowed]
    if not able:
        return "abstains: nothing may be chosen here (see the table)"
    best = able[0]
    said = (
        f"abstains: the best that may be chosen, {best.config}, is {_gain(best.time_over_default)}"
    )
    action = [config.key for config in policy.manifest.actions().configs].index(best.config)
    least = policy.least_gains(observations)
    if least is not None:
        needed = max(answer.margin, float(least[0, action]))
        return f"{said}; it must be beyond {needed:.2%}, so many of its spreads as are safe"
    needed = max(answer.margin, answer.noise_band or 0.0)
    more = (
        "" if best.time_over_default * (1.0 + needed) > 1.0 else ", and all its networks must agree"
    )
    return f"{said}; it must be beyond {needed:.2%}{more}"


def verdict_text(gate: Cell | None) -> str:
    """The gate's verdict as text."""
    if gate is None:
        return "no gate judged this policy: nothing but its own margin holds it back"
    if gate.verdict is Verdict.ABSTAINS:
        return "the policy wanted nothing here, so there was nothing to judge"
    runs = f"{gate.runs} fresh runs" if gate.runs else "not measured"
    gain = "" if gate.gain is None else f", gain {gate.gain:+.2%}"
    chance = "" if gate.p_value is None else f", p {gate.p_value:.2g}"
    reason = f": {gate.reason}" if gate.reason else ""
    return f"{gate.verdict} {gate.config}{reason} ({runs}{gain}{chance})"
