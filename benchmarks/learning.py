"""The figures of docs/results.md: the belief against simpler rules.

    python benchmarks/learning.py            # `make bench-learning`: fewer draws, under an hour
    FULL=1 python benchmarks/learning.py     # all draws, and all gates
    python benchmarks/learning.py few-shot   # some parts with all draws; other figures stay

Parts: `few-shot`, probe by probe (learning_belief.py); `sweeps`, whole, noisy and small ones,
`public`, published ones, and `shapes`, group shapes that nobody measured (learning_sweeps.py);
`gate` (bench_gate.py). Begins with the figures of docs/results.json.
"""

import shutil
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from bench_gate import gate_figures
from harness import FULL, OUT, ROOT, run_parts
from learning_belief import few_shot_figures
from learning_sweeps import public_figures, shape_figures, sweep_figures

#: Judge's worlds; a run of all parts without FULL has fewer.
WORLDS: Final = 200 if FULL or sys.argv[1:] else 40

if __name__ == "__main__":
    OUT.mkdir(parents=True, exist_ok=True)
    if not (OUT / "learning.json").exists():
        shutil.copy(ROOT / "docs" / "results.json", OUT / "learning.json")
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "few-shot": partial(few_shot_figures, WORLDS),
        "sweeps": partial(sweep_figures, WORLDS),
        "public": public_figures,
        "shapes": shape_figures,
        "gate": gate_figures,
    }
    run_parts("learning", parts)
