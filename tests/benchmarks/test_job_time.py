"""The worlds of the job time benchmark: what rules may choose there, and that one is the best."""

import numpy as np
from bench_job_time import CONFIGS, job_of, world_of
from job_rules import Measured, choices

from dynamiccl.nccl import Collective
from dynamiccl.simulator.system import Group
from dynamiccl.simulator.systems import find_system
from dynamiccl.simulator.workloads import WorkCall

GATHER = WorkCall(Group(1, 8), Collective.AllGather, 64 << 20, 100.0, 600.0)
REDUCE = WorkCall(Group(1, 8), Collective.AllReduce, 25 << 20, 100.0, 600.0)


def test_channels_go_down_only_and_stay_where_allgathers_are_kept() -> None:
    base, once = world_of(find_system("b300-nvlink"), [GATHER, REDUCE]), np.ones(2, dtype=np.int64)
    free, kept = (job_of(base, once, "waves", kept=kept) for kept in (False, True))
    channels = free.world.num_channels
    assert (channels <= channels[:, :1])[free.allowed].all()
    assert {CONFIGS[action].num_channels for action in np.flatnonzero(kept.allowed[0])} == {None}
    assert kept.allowed[1].tolist() == free.allowed[1].tolist()
    assert kept.allowed[0].sum() < free.allowed[0].sum()
    picked = choices(Measured(kept, 0))
    nvls, _ = picked.pop("efficiency")
    assert channels[[0, 1], nvls].tolist() == [4, 8]
    best, _ = picked["ceiling"]
    for rule, (actions, spent) in picked.items():
        assert kept.allowed[[0, 1], actions].all()
        assert kept.step_us(best) <= kept.step_us(actions)
        assert (spent > 0) == (rule in {"autoccl", "lagom", "lagom_12"})
