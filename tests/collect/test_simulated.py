"""The simulator as a runner: what it refuses; its rows are in the goldens of sweeps."""

import pytest

from dynamiccl.collect.simulated import SimulatorRunner
from dynamiccl.errors import InvalidSweep
from tests.collect.benchmark.stand_in import sweep

B300 = {"simulator": '{ system = "b300-nvlink" }'}


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"groups": "[{ num_nodes = 3, ranks_per_node = 8 }]"},
            r"no group of 3x8; choose from 1x2, 1x3,",
        ),
        ({"collectives": '["AlltoAll"]'}, "no AlltoAll; choose from Broadcast, Reduce, AllGather"),
        (
            {"profiles": '[{ name = "shm", transport = "SHM" }]'},
            "knows no launch profiles of 'h100-ib': remove 'shm'",
        ),
        (
            {"interference": '[{ kind = "cpu", level = 0.5 }]'},
            "no interference cpu; choose from none, congestion",
        ),
        (
            {"profiles": '[{ name = "big", env = { NCCL_BUFFSIZE = "8388608" } }]', **B300},
            r"sets NCCL_BUFFSIZE, which .* not model",
        ),
        (
            {"profiles": '[{ name = "odd", env = { NCCL_NTHREADS = "many" } }]', **B300},
            r"profile 'odd': invalid literal for int\(\) with base 10: 'many'",
        ),
        (
            {"nccl_version": '"2.29.2"'},
            "names NCCL 2.29.2, and the simulated system 'h100-ib' runs 2.27.5; write 2.27.5, ",
        ),
    ],
)
def test_sweep_outside_the_model_is_refused_before_it_runs(keys: dict[str, str], said: str) -> None:
    made = sweep(**keys)
    with pytest.raises(InvalidSweep, match=said):
        SimulatorRunner(made.file).check(made.trials)
