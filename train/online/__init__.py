"""Online training in simulated worlds: the environment, A3C and IMPALA.

Importing it registers `gymnasium.make("dynamiccl/Collectives-v0")`.
"""

import gymnasium

gymnasium.register(
    "dynamiccl/Collectives-v0",
    entry_point="dynamiccl.train.environment:Collectives",
    vector_entry_point="dynamiccl.train.environment:make_vector",
)
