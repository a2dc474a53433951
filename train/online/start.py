"""Initial weights of actors from an offline-trained Q network.

A Q network predicts z = ln(time / reference), and an actor's logits are -z: so the weights can be
copied, and the initial policy prefers what the Q network prefers. Relevant differences in z are of
the order of 0.01, for which a softmax is nearly uniform: so the logits are scaled up.
"""

from pathlib import Path
from typing import Final

from dynamiccl.datasets.manifest import POLICY_NAME, find_policy_in
from dynamiccl.errors import MissingPath, UserError
from dynamiccl.train.action_head import ActionHead
from dynamiccl.train.online.actor_critic import ActorCritic
from dynamiccl.train.torch_files import load_script

#: A config that is predicted to be 3 % slower is taken 1 / e times as often.
SHARPNESS: Final = 1.0 / 0.03
#: In a policy module: the first network of the ensemble.
_MEMBER: Final = "members.0."


def begin_with(network: ActorCritic, path: Path) -> None:
    """Initialise the actor with the weights of the first network of a policy.

    Raises MissingPath without a policy, CorruptFile, and UserError for a policy of another form.
    """
    folder = find_policy_in(path)
    if folder is None:
        raise MissingPath("policy", path, "give --set start= the directory of a run of networks")
    module = load_script(folder / POLICY_NAME)
    found = module.state_dict()
    ours = {"trunk": network.actor.encoder.trunk, "head": network.actor.head}
    for name, part in ours.items():
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
    head = network.actor.head
    if isinstance(head, ActionHead):
        head.uses_cost = bool(getattr(module.members, "0").head.uses_cost)
    network.sharpness = SHARPNESS
