"""Makes a decision table from a policy."""

from dynamiccl.datasets.features import Observations
from dynamiccl.datasets.manifest import Manifest, Support
from dynamiccl.datasets.questions import cold_questions, decide
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.torchscript import ScriptedPolicy


def make_table(policy: ScriptedPolicy, manifest: Manifest, support: Support) -> DecisionTable:
    """Ask the policy about every bin and every tuned collective of one communicator shape."""
    asked = cold_questions(manifest, support)
    actions = decide(policy, Observations.cold(asked.context), asked.mask)
    configs = manifest.actions().configs
    chosen = [configs[action] for action in actions]
    rows = [chosen[i : i + asked.num_bins] for i in range(0, len(chosen), asked.num_bins)]
    return DecisionTable.from_configs(
        rows,
        num_nodes=support.num_nodes,
        num_ranks=support.num_ranks,
        first_bin=asked.first_bin,
    )
