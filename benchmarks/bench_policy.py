"""Time of one policy step for all task keys at once, in TorchScript.

    python benchmarks/bench_policy.py

A network of the kind and size that a policy may have (LSTM with 64 units over the window, two
layers over it and the context, 64 actions; random weights) decides every size bin of five
collectives with a full window each, 50 times, on one thread, through the library that the plugin
opens. `policy_step_ms` is for the sizes that nccl-tests sweeps, 8 B to 16 GiB;
`policy_step_every_bin_ms` for all the bins that a table can have. Writes out/bench/policy.json.
"""

import json
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from harness import write_result
from torch import nn

from dynamiccl.datasets.features import FEATURES
from dynamiccl.datasets.history_columns import WINDOW_FEATURES
from dynamiccl.datasets.manifest import BRAIN_NAME, Support
from dynamiccl.datasets.questions import ColdQuestions
from dynamiccl.nccl import Algorithm, Config, Protocol
from dynamiccl.serve.brain_module import write_brain
from dynamiccl.serve.build import TORCH_RUNTIME_NAME, build_plugin
from dynamiccl.serve.table import MAX_BINS
from dynamiccl.serve.torchscript import ignore_deprecation
from dynamiccl.sizes import size_bin

NUM_NODES, NUM_RANKS, NUM_ACTIONS, HIDDEN = 4, 32, 64, 64
SYSTEM = "bench"
SWEPT: Final = (size_bin(8), size_bin(16 << 30))
EVERY: Final = (0, MAX_BINS - 1)


class LstmPolicy(nn.Module):
    """(window, context, mask) -> (action, q), as an exported policy."""

    def __init__(self) -> None:
        """Lay out the layers."""
        super().__init__()
        self.encoder = nn.LSTM(len(WINDOW_FEATURES), HIDDEN, batch_first=True)
        self.trunk = nn.Sequential(
            nn.Linear(HIDDEN + len(FEATURES), 128), nn.SiLU(), nn.Linear(128, 128), nn.SiLU()
        )
        self.value = nn.Linear(128, 1)
        self.advantage = nn.Linear(128, NUM_ACTIONS)

    def forward(
        self, window: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(action, q): the best allowed action."""
        hidden = self.encoder(window)[0][:, -1]
        features = self.trunk(torch.cat([hidden, context], dim=1))
        q = self.value(features) + self.advantage(features)
        q = q.masked_fill(mask < 0.5, -1e6)
        return q.argmax(dim=1), q


def write_artifact(directory: Path, bins: tuple[int, int]) -> None:
    """Write the files that the runtime reads: a brain that may choose any action everywhere."""
    random = np.random.default_rng(2)
    num_bins = bins[1] - bins[0] + 1
    support = Support(
        system=SYSTEM,
        num_nodes=NUM_NODES,
        ranks_per_node=NUM_RANKS // NUM_NODES,
        num_ranks=NUM_RANKS,
        launch_profile="default",
        nccl_version=None,
        gpu=None,
        simulated=True,
        environment={},
        measured={},
        noise_bands={},
    )
    context = random.normal(size=(5 * num_bins, len(FEATURES))).astype(np.float32)
    mask = np.ones((5 * num_bins, NUM_ACTIONS), dtype=np.bool_)
    channels = range(1, NUM_ACTIONS)
    configs = [Config(), *(Config(Algorithm.Ring, Protocol.Simple, count) for count in channels)]
    torch.manual_seed(3)
    with ignore_deprecation():
        scripted: Any = torch.jit.script(LstmPolicy())
        scripted.save(str(directory / "policy.pt"))
    questions = [ColdQuestions(support, bins[0], num_bins, context, mask)]
    write_brain(directory / "policy.pt", configs, questions, directory / BRAIN_NAME)


def measure(build_dir: Path, bins: tuple[int, int]) -> dict[str, float]:
    """The figures of `bench_policy` for a table with these bins."""
    with tempfile.TemporaryDirectory() as folder:
        write_artifact(Path(folder), bins)
        shape = [SYSTEM, str(NUM_NODES), str(NUM_RANKS)]
        done = subprocess.run(
            [build_dir / "bench_policy", build_dir / TORCH_RUNTIME_NAME, folder, *shape],
            # One thread is what the runtime itself asks for; no setting from outside may help it.
            env={name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"},
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
    figures: dict[str, float] = json.loads(done.stdout)
    return figures


def main() -> None:
    """Build, measure, write."""
    build_dir = build_plugin(Path("out/bench-plugin"), tests=True, torch=True).parent
    every = measure(build_dir, EVERY)
    figures: dict[str, float | int | str] = {
        **measure(build_dir, SWEPT),
        "policy_step_every_bin_ms": every["policy_step_ms"],
    }
    write_result("policy", figures)


if __name__ == "__main__":
    main()
