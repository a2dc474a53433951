"""All figures of docs/results.md: learned policies against simpler baselines.

    python benchmarks/learning.py            # `make bench-learning`: fewer draws, under an hour
    FULL=1 python benchmarks/learning.py     # all parts, recipes and draws, and all gates
    python benchmarks/learning.py ope gate   # some parts; the others' figures stay as they are

Parts: the belief in `few-shot`, probe by probe, and `rivals`, after 48 decisions
(learning_belief.py), in `sweeps`, whole, noisy and small ones, and `public`, published ones
(learning_sweeps.py); `shapes`, group shapes that nobody measured (learning_grids.py); `narrow`,
logs of a table in use; `ope`, off-policy estimates (learning_PART.py); `gate`, what bench_gate.py
prints. What learning is worth where surroundings change, bench_a3c.py and bench_mvfst.py ask.

Writes out/bench/learning.json: single figures by name, and under `data_sets` figures by data set
and policy, with `_lo` and `_hi` (95 %); the part's minutes and its commit.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from harness import OUT, machine_facts
from learning_belief import few_shot_figures, rival_figures
from learning_grids import measure, shape_figures, train
from learning_narrow import narrow_figures
from learning_ope import ope_figures
from learning_sweeps import public_figures, sweep_figures
from rich.console import Console
from rich.table import Table

from dynamiccl.datasets.store import git_commit

SEEDS: Final = 5
#: Sweeps of which two of ten shapes are left out in each turn.
SHAPE_SEEDS: Final = 2
#: Parts that take half an hour each or more: with FULL=1, or by name.
LONG: Final = ("shapes",)
#: Judge's worlds, and those on which rivals play; `make bench-learning` has fewer.
QUICK_WORLDS: Final = 40, 8
WORLDS: Final = 200, 20
#: The recipe of the policy whose value is estimated.
RECIPE: Final = "ddqn-dueling"
#   FULL  anything: a benchmark makes all its draws, as for docs/; hours in place of minutes.
FULL: Final = bool(os.environ.get("FULL"))
HERE: Final = Path(__file__).resolve().parent
PATH: Final = OUT / "learning.json"
SHOWN: Final = HERE.parent / "docs" / "results.json"
console = Console(width=150)


def main() -> None:
    """Run the parts that are asked for."""
    is_quick = not FULL and not sys.argv[1:]
    worlds, rival_worlds = QUICK_WORLDS if is_quick else WORLDS
    figures: dict[str, Any] = {"minutes": {}, "data_sets": {}}
    # Parts that are left out stay as they were, here or on the page.
    if sys.argv[1:] or not FULL:
        figures = json.loads((PATH if PATH.exists() else SHOWN).read_text(encoding="utf-8"))

    parts: dict[str, Callable[[Path], dict[str, Any]]] = {
        "few-shot": lambda _: few_shot_figures(worlds),
        "rivals": lambda _: rival_figures(rival_worlds),
        "sweeps": lambda _: sweep_figures(worlds),
        "public": lambda _: public_figures(),
        "shapes": lambda out: shape_figures(out, SHAPE_SEEDS),
        "narrow": narrow_figures,
        "ope": lambda out: ope_figures(out, train(measure(out, 0), RECIPE, 0)),
        "gate": lambda _: printed_by_gate(),
    }
    asked = sys.argv[1:] or [name for name in parts if FULL or name not in LONG]
    unknown = set(asked) - set(parts)
    if unknown:
        sys.exit(f"no part {', '.join(sorted(unknown))}; choose from {', '.join(parts)}")
    for name in asked:
        console.print(f"{name} ...")
        began = time.monotonic()
        with tempfile.TemporaryDirectory() as folder:
            made = parts[name](Path(folder))
        for data_set, policies in made.pop("data_sets", {}).items():
            figures["data_sets"].setdefault(data_set, {}).update(policies)
        figures |= made | {"seeds": SEEDS} | machine_facts()
        figures["minutes"][name] = round((time.monotonic() - began) / 60, 1)
        figures.setdefault("commits", {})[name] = git_commit()
        PATH.parent.mkdir(parents=True, exist_ok=True)
        PATH.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    show(figures)
    console.print(str(PATH))


def printed_by_gate() -> dict[str, Any]:
    """The results that bench_gate.py wrote."""
    subprocess.run([sys.executable, HERE / "bench_gate.py"], check=True, stdout=subprocess.DEVNULL)
    read: dict[str, Any] = json.loads((OUT / "gate.json").read_text(encoding="utf-8"))
    return {
        key: value for key, value in read.items() if key.startswith(("gate_", "small_sweep_gate_"))
    }


def show(figures: dict[str, Any]) -> None:
    """Print a table for each data set."""
    for name, policies in figures["data_sets"].items():
        keys = [key for key in next(iter(policies.values())) if not key.endswith(("_lo", "_hi"))]
        table = Table("policy", *keys, title=name)
        for policy, row in policies.items():
            table.add_row(policy, *(_cell(row, key) for key in keys))
        console.print(table)


def _cell(row: dict[str, float | None], key: str) -> str:
    ends = [row.get(f"{key}{end}") for end in ("_lo", "_hi")]
    shown = ["-" if each is None else f"{each:.4g}" for each in (row.get(key), *ends)]
    return shown[0] if None in ends else f"{shown[0]} [{shown[1]}, {shown[2]}]"


if __name__ == "__main__":
    main()
