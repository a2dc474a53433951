"""The `groups` of a sweep file: nodes, ranks per node, and the split into communicators."""

from typing import Annotated, Self

from pydantic import AfterValidator, Field, model_validator

from dynamiccl.collect.sweep.splits import Comms, Split
from dynamiccl.simulator.toml_table import Table


class GroupShape(Table):
    """Nodes and ranks per node of a communicator, as NCCL counts them; with a split, of the job."""

    num_nodes: int = Field(ge=1)
    ranks_per_node: int = Field(ge=1)
    #: Hosts that it is started on, where NCCL counts others: a whole NVL72 is one node to it.
    num_hosts: int | None = Field(default=None, ge=1)
    #: Several communicators at once: the shape is the job's, and nccl-tests splits it (splits.py).
    split: Annotated[str, AfterValidator(lambda text: Split.parse(text).text)] | None = None
    #: Whether the split may leave single processes over, which have nobody to talk to.
    spare: bool = False

    @model_validator(mode="after")
    def _hosts_share_the_ranks(self) -> Self:
        ranks = self.num_nodes * self.ranks_per_node
        if self.num_hosts is not None and ranks % self.num_hosts:
            raise ValueError(f"{ranks} ranks cannot be shared out evenly to {self.num_hosts} hosts")
        if self.split is not None and self.num_hosts not in {None, self.num_nodes}:
            raise ValueError(
                "split needs nodes that are hosts, and num_hosts says otherwise; leave it out"
            )
        if self.spare and self.split is None:
            raise ValueError("spare is about the processes that a split leaves over; give one")
        self.comms()
        return self

    def comms(self) -> Comms | None:
        """The communicators that the split makes; None without a split."""
        if self.split is None:
            return None
        shape = (self.num_nodes, self.ranks_per_node)
        return Split.parse(self.split).comms(*shape, spare=self.spare)

    @property
    def hosts(self) -> int:
        """Number of hosts of the job."""
        return self.num_hosts or self.num_nodes

    @property
    def ranks_per_host(self) -> int:
        """Ranks on each host of the job."""
        return self.num_nodes * self.ranks_per_node // self.hosts
