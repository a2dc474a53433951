"""The policies that a brain process can run: built-in ones by name, or `module:function`.

A policy is an object with `decide(config, history)`; one is made for each communicator. It proposes
whole tables; the plugin checks every table, and all ranks agree on it before it takes effect.
`--policy my_module:make` uses your own: `make(artifact, seed)` is called with the opened artifact
and returns such an object.
"""

import importlib
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from dynamiccl.datasets.manifest import BRAIN_NAME
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.serve.artifact import Artifact, pick_table
from dynamiccl.serve.brain.tuning import autoccl_brain, search_brain
from dynamiccl.serve.brain_history import BrainConfig, History
from dynamiccl.serve.table import DecisionTable
from dynamiccl.serve.torchscript import ScriptedBrain


class Brain(Protocol):
    """The interface of a policy for one communicator."""

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The table that should be in force next; None keeps the current one.

        An exception is logged and sent to the leader, which keeps its table.
        """
        ...


MakeBrain = Callable[[Artifact, int], Brain]


class KeepBrain:
    """Never changes the table: for measuring the overhead of asking."""

    def decide(self, config: BrainConfig, history: History) -> None:
        """None: keep the table."""


class TableBrain:
    """The artifact's own table."""

    def __init__(self, artifact: Artifact) -> None:
        """Take tables from `artifact`."""
        self._artifact = artifact

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The table of the communicator's shape; None where it is in force already."""
        info = pick_table(self._artifact, config.num_nodes, config.num_ranks, config.system)
        table = DecisionTable.read(self._artifact.directory / info.path)
        return None if table == history.table else table


class PolicyBrain:
    """The artifact's policy on the live history, as the plugin runs it inside a job."""

    def __init__(self, artifact: Artifact) -> None:
        """Load `brain.pt`; raises UserError for an artifact of an older release."""
        artifact.refuse_slack("which no brain knows")
        path = artifact.directory / BRAIN_NAME
        if not path.is_file():
            raise UserError(
                f"{artifact.directory} has no {BRAIN_NAME}; export it again with this release, or "
                "take --policy table"
            )
        self._brain = ScriptedBrain(path)

    def decide(self, config: BrainConfig, history: History) -> DecisionTable | None:
        """The policy's table for all task keys; None for an unknown shape."""
        return self._brain.decide(config, history.tasks)


POLICIES: Final[Mapping[str, MakeBrain]] = {
    "keep": lambda _artifact, _seed: KeepBrain(),
    "table": lambda artifact, _seed: TableBrain(artifact),
    "artifact": lambda artifact, _seed: PolicyBrain(artifact),
    "autoccl": autoccl_brain,
    "search": search_brain,
}


def find_policy_maker(name: str) -> MakeBrain:
    """A built-in policy's maker, or `module:function` of your own.

    Raises UnknownName and UserError.
    """
    if ":" not in name:
        if name not in POLICIES:
            raise UnknownName("policy", name, [*POLICIES, "module:function"], where="--policy")
        return POLICIES[name]
    module_name, _, attribute = name.partition(":")
    try:
        maker = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        raise UserError(
            f"--policy {name} cannot be imported: {error}; is its directory in PYTHONPATH?"
        ) from error
    found: MakeBrain = maker
    return found
