"""The figures of docs/results.md: the belief against simpler rules.

    python benchmarks/learning.py            # `make bench-learning`: fewer draws, under an hour
    FULL=1 python benchmarks/learning.py     # all draws, and all gates
    python benchmarks/learning.py few-shot   # some parts with all draws; other figures stay

Parts: `few-shot`, probe by probe (learning_belief.py); `sweeps`, whole, noisy and small ones,
`public`, published ones, and `shapes`, group shapes that nobody measured (learning_sweeps.py);
`gate` (bench_gate.py). What learning is worth where surroundings
change, bench_a3c.py and bench_mvfst.py ask.

Writes out/bench/learning.json: figures by name, with `_lo` and `_hi` (95 %), and each part's
minutes and commit. Begins with the figures of docs/results.json.
"""

import os
import shutil
import sys
from functools import partial
from typing import Final

from bench_gate import gate_figures
from harness import OUT, ROOT, run_parts
from learning_belief import few_shot_figures
from learning_sweeps import public_figures, shape_figures, sweep_figures

#: Judge's worlds; a run of all parts without FULL has fewer.
QUICK_WORLDS: Final = 40
WORLDS: Final = 200


def main() -> None:
    """Run the parts that are asked for."""
    is_quick = not (os.environ.get("FULL") or sys.argv[1:])
    worlds = QUICK_WORLDS if is_quick else WORLDS
    if not (OUT / "learning.json").exists():
        OUT.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / "docs" / "results.json", OUT / "learning.json")
    run_parts(
        "learning",
        {
            "few-shot": partial(few_shot_figures, worlds),
            "sweeps": partial(sweep_figures, worlds),
            "public": public_figures,
            "shapes": shape_figures,
            "gate": gate_figures,
        },
    )


if __name__ == "__main__":
    main()
