"""Training by trying: decisions in simulated worlds, and what learns from them.

Importing it registers `gymnasium.make("dynamiccl/Collectives-v0")`.
"""

import gymnasium

gymnasium.register(
    "dynamiccl/Collectives-v0",
    entry_point="dynamiccl.train.online.collectives:Collectives",
    vector_entry_point="dynamiccl.train.online.collectives:make_vector",
)
