"""Initial weights of networks from an exported policy, trained on data or in the simulator.

A Q network predicts z = ln(time / reference), and an actor's logits are -z by its head's sharpness:
so the weights can be copied, and what one prefers the other prefers. Relevant differences in z are
of the order of 0.01, for which a softmax is nearly uniform: so an actor that begins with a Q
network has its sharpness, and a Q network that begins with an actor has its z scaled down.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

import torch

from dynamiccl.datasets.manifest import POLICY_NAME, find_policy_in
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train.action_head import SHARPNESS, ActionHead
from dynamiccl.train.heads import Head, Imitator, LogTimeHead, Member
from dynamiccl.train.torch_files import load_script

#: In a policy module: the first network of the ensemble.
_MEMBER: Final = "members.0."


def begin_with(networks: Iterable[Member], path: Path) -> None:
    """Initialise encoders and heads with the weights of the first network of a policy.

    Raises MissingPath without a policy, CorruptFile, and UserError for a policy of another form.
    """
    folder = find_policy_in(path)
    if folder is None:
        raise MissingPath("policy", path, "give --set start= the directory of a run of networks")
    module = load_script(folder / POLICY_NAME)
    for network in networks:
        _copy(module, network, path)


def _copy(module: torch.jit.ScriptModule, network: Member, path: Path) -> None:
    found = module.state_dict()
    for name, part in (("trunk", network.encoder.trunk), ("head", network.head)):
        begin = f"{_MEMBER}{name}."
        weights = {k.removeprefix(begin): v for k, v in found.items() if k.startswith(begin)}
        try:
            part.load_state_dict(weights)
        except RuntimeError as error:
            said = str(error).splitlines()[1].strip()
            raise UserError(
                f"the policy at {path} has networks of another form ({said}): it must have been "
                "trained on the same data with the same hidden_sizes, window_encoder, "
                "action_inputs and state_units"
            ) from error
    theirs = getattr(module.members, "0").head
    sharpness = float(getattr(theirs, "sharpness", SHARPNESS))  # older files: of Q networks
    if isinstance(network.head, ActionHead):
        network.head.uses_cost = bool(theirs.uses_cost)
    if isinstance(network, Imitator):
        network.head.sharpness = sharpness
    else:
        _scale(network.head, sharpness / SHARPNESS)


def _scale(head: Head, factor: float) -> None:
    """Multiply differences of z by a factor; what NCCL's costs say of a time stays."""
    if isinstance(head, ActionHead):
        layer = head.out
    else:
        layer = head.advantage if isinstance(head, LogTimeHead) else head.layer
    with torch.no_grad():
        layer.weight.mul_(factor)
        layer.bias.mul_(factor)
