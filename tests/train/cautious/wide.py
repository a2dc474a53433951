"""A sweep of several group shapes, and a run trained on it."""

from dataclasses import dataclass
from pathlib import Path

from dynamiccl.train.export import FitSummary
from tests.data_sets import SWEEP

_GROUPS = ", ".join(f"{{ num_nodes = {n}, ranks_per_node = 8 }}" for n in (2, 4, 8))
WIDE = SWEEP.replace("{ num_nodes = 4, ranks_per_node = 8 }", _GROUPS).replace(
    'max = "1G"', 'max = "1G", steps_per_octave = 2'
)


@dataclass(frozen=True)
class Run:
    data: Path
    uri: str
    summary: FitSummary

    @property
    def policy(self) -> Path:
        return Path(self.summary.run_directory) / "policy"
