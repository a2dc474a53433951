"""The recipe: a complete, frozen training set-up (`recipes.py` has the built-in ones)."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Annotated, Any, Self

from dynamiccl.errors import UserError
from dynamiccl.train.bounds import Within
from dynamiccl.train.recipe_checks import CostBase, RewardScale


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """A complete training set-up; every field is commented with unit or meaning."""

    name: str
    summary: str
    #: The file that it comes from, when it is not one of ours.
    source: str = ""
    #: d3rlpy algorithm: DoubleDQN, DiscreteCQL or DiscreteBC; or GaussianProcess, A3C or IMPALA.
    algorithm: str
    #: How the window is read: mlp (as it is), lstm, gru or cnn.
    window_encoder: str = "mlp"
    #: Whether value and advantage have heads of their own.
    dueling: bool = True
    #: Whether actions are inputs of the head, with NCCL's own costs of them where the data hold
    #: these (action_head.py), and not an output each.
    action_inputs: bool = False
    #: What a head with actions as inputs learns: how far a time is from NCCL's cost, the time, or
    #: whichever held-out sizes speak for (cost_base.py).
    cost_base: str = CostBase.HELD_OUT.value
    #: Share of the rows of a batch whose costs are hidden, for a head with actions as inputs: so it
    #: learns to do without where NCCL's costs are not known.
    cost_dropout: Annotated[float, Within(0, 1)] = 0.1
    #: Discount of the next call of the task key. Steps of static sweeps end their episodes, so
    #: that it comes to nothing there.
    gamma: Annotated[float, Within(0, 1)] = 0.0
    #: Calls whose rewards are summed before the value of what follows is asked; 1 where gamma is 0.
    num_steps: Annotated[int, Within(1, 100)] = 1
    #: Calls of jobs are rewarded by the mean over the calls from them on that took the same action,
    #: at most so many: a decision stays in force for a while, and a change of config costs once. It
    #: takes the place of looking ahead, so only where gamma is 0.
    held_calls: Annotated[int, Within(1, 10_000)] = 1
    #: What a call of a job that runs another config than the call of its task key before costs
    #: beside its time, in units of NCCL's default; and each unit of the interference level (0.5: a
    #: call that took half as long again as quiet), which a Trigger tells.
    lambda_switch: Annotated[float, Within(0, 1e6)] = 0.0
    lambda_congestion: Annotated[float, Within(0, 1e6)] = 0.0
    #: Weight of CQL's conservative loss.
    conservative_weight: Annotated[float, Within(0, 1e6)] = 0.0
    #: Weight of the entropy in the loss, at the first and at the last gradient step.
    entropy_start: Annotated[float, Within(0, 1e6)] = 0.0
    entropy_end: Annotated[float, Within(0, 1e6)] = 0.0
    #: At the first gradient step; it falls to 0 along a cosine.
    learning_rate: Annotated[float, Within(0, 1, low_is_open=True)] = 1e-3
    #: Steps (of calls, and of sweeps) in a batch.
    batch_size: Annotated[int, Within(2, 1 << 16)] = 256
    #: Whether half of every batch comes from the calls of jobs, where the data set holds any.
    use_calls: bool = True
    #: Run directory of a Trigger (`dynamiccl-train trigger`), or its file: it tells the policy the
    #: interference of calls, in training and where it is deployed; empty = unknown.
    trigger: str = ""
    #: Gradient steps in all, and between two looks at the validation bins.
    steps: Annotated[int, Within(1, 10**8)] = 4_000
    steps_per_epoch: Annotated[int, Within(1, 10**8)] = 200
    #: Units of each layer of the MLP that reads window and context together.
    hidden_sizes: Annotated[tuple[int, ...], Within(1, 1 << 14)] = (128, 128)
    #: Units of an LSTM whose state lives as long as the job (stateful_trunk.py), of algorithms that
    #: play in the simulator; 0 = none.
    state_units: Annotated[int, Within(0, 1 << 12)] = 0
    #: Networks trained side by side; what they differ by tells how sure they are.
    num_members: Annotated[int, Within(1, 100)] = 3
    #: How strongly rare (system, collective) groups are sampled more often: 0 = as they come,
    #: 1 = every group equally often.
    balance: Annotated[float, Within(0, 1)] = 1.0
    #: Decay a step of the running average of the weights, which is what is validated and exported:
    #: single weights swing from epoch to epoch by more than the configs differ.
    average_decay: Annotated[float, Within(0, 1, high_is_open=True)] = 0.995
    #: Validation regrets (fractions) that differ by less count as equal; the later checkpoint wins.
    checkpoint_tolerance: Annotated[float, Within(0, 1)] = 0.002
    #: Gradient steps between two copies of the weights to the target network.
    target_update_interval: Annotated[int, Within(1, 10**8)] = 500
    #: Margins in log time to choose from on validation: a config must be predicted to be this much
    #: faster than NCCL's own choice, else the policy abstains.
    abstain_margins: Annotated[tuple[float, ...], Within(0, 1)] = (0.02, 0.03, 0.05)
    #: Whether every member has to predict a gain beyond the margin and the noise band, or their
    #: mean one beyond the margin.
    unanimous: bool = True
    #: The margin where there are calls to go by, of which cold validation says nothing: the mean of
    #: the members, not each of them, has to be this much faster.
    warm_margin: Annotated[float, Within(0, 1)] = 0.02
    #: What is held out for validation and test (datasets/splits.py): octaves of sizes, whole group
    #: shapes (shape), systems or runs; shape:1 is the next turn of shapes, after shape:0.
    split: str = "size"
    #: Of a Gaussian process: the share of the sizes at which it acts that may be slower than NCCL's
    #: own choice, in worlds like those drawn.
    alpha: Annotated[float, Within(0, 1, low_is_open=True, high_is_open=True)] = 0.01
    #: Above which interference level a Gaussian process takes what is best where calls take 1.5
    #: times as long, and below it what is best in quiet; 0: it goes by the level itself.
    level_threshold: Annotated[float, Within(0, 1e6)] = 0.0
    #: Where actors play (train/online/places.py), by commas; how many there are, one a place
    #: at least; jobs of each, and rounds of an episode. `steps` are updates, of `num_steps` rounds.
    places: str = ""
    actors: Annotated[int, Within(1, 1024)] = 2
    jobs: Annotated[int, Within(1, 1024)] = 8
    episode_rounds: Annotated[int, Within(1, 10**6)] = 50
    #: The latest decisions about a key that the critic sees, those not in force yet among them.
    seen_decisions: Annotated[int, Within(0, 64)] = 4
    #: Whether A3C's actors share RMSProp's statistic, or each keeps its own (Mnih et al. 2016, S4).
    shared_statistic: bool = True
    #: Run or policy directory of networks to begin with (start.py); empty = none.
    start: str = ""
    #: How much their episodes differ: slowdowns and dwell times of the scenario by a factor of so
    #: much at most; times of each algorithm and protocol by so much, as ln (online/variation.py).
    vary: Annotated[float, Within(1, 100)] = 1.4
    vary_times: Annotated[float, Within(0, 2)] = 0.05
    #: IMPALA's bounds of how far it corrects for weights that have moved since: rho and c of
    #: V-trace (Espeholt et al. 2018, section 4.1).
    rho_most: Annotated[float, Within(0, 1e6, low_is_open=True)] = 1.0
    c_most: Annotated[float, Within(0, 1e6, low_is_open=True)] = 1.0
    #: Decisions about the keys of a job from one that is left to NCCL to the next, for a policy
    #: with `state_units`: a config that feels no interference tells nothing of its end. Actors
    #: draw one of these for each job, and the fastest in validation is exported; 0 = never.
    probe_every: Annotated[tuple[int, ...], Within(0, 10**6)] = (0,)
    #: What actors earn (recipe_checks.py): by the logarithm, a connection of 20 ms at first use
    #: does not drown all else.
    reward_scale: str = RewardScale.LOG.value

    def to_json(self) -> dict[str, Any]:
        """Plain data for logs and manifests."""
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """The inverse of `to_json`; raises UserError for a setting of another release."""
        unknown = sorted(set(values) - {f.name for f in fields(cls)})
        if unknown:
            raise UserError(
                f"recipe '{values.get('name')}' has the setting {unknown[0]}, which this release "
                "does not have: finish the run with the release that began it, or train anew"
            )
        known: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value
            for name, value in values.items()
        }
        return cls(**known)

    def entropy_weight(self, step: int) -> float:
        """Entropy weight at gradient step 1 to `steps`: linear."""
        share = (step - 1) / max(self.steps - 1, 1)
        return self.entropy_start + share * (self.entropy_end - self.entropy_start)
