"""Learning inside the simulated network: what A3C and IMPALA gain there.

    python benchmarks/bench_online.py            # an hour on 2 cores

In each of `PLACES` (scenario_places.py) the recipes of `RECIPES` learn from the same sweep as
the offline policy, at the workload's calls moved to octaves for training, under the place's
scenario in strengths, dwell times and times that are drawn anew for each episode. All then play the
real workload, under the scenario as it was recorded and *shifted* (half as strong again, twice as
fast: outside of what was drawn), beside NCCL, the offline policy with its Trigger, a fitted
threshold rule, and an oracle that knows the state and is as late as ranks agree.

*Gain* is the share of NCCL's communication time that is saved; figures are ratios of its sums over
places to the delayed oracle's, with 95 % bootstraps of seeds and jobs. Writes
out/bench/online.json: keys without a recipe's name are those of the recipe that gains most in the
scenario as recorded on seed 0, and are of the other seeds.
"""

import tempfile
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
from harness import parallel, write_result
from learning_scenarios import RULE, gain_row, play_place
from scenario_places import PLACES as ALL_PLACES
from scenario_places import trained

from dynamiccl.evaluate.simulate import NCCL
from dynamiccl.train.policy import TorchPolicy

#: Of scenario_places.py.
PLACES: Final = ("b300, decode and lora, busy-host", "h100 4x8, decode, congested")
RECIPES: Final = ("a3c-lstm", "impala-lstm")
SEEDS: Final = 3
#: Updates of a run: five minutes and less, where nothing runs beside it.
STEPS: Final = 600
WORLDS: Final = {"as recorded": "", "shifted": "_shifted"}
Times = dict[tuple[str, str, str], list[npt.NDArray[np.float64]]]


def main() -> None:
    """All recipes on seed 0; the one that gains most there alone on the other seeds."""
    with tempfile.TemporaryDirectory() as folder:
        found = _played(Path(folder), [0], RECIPES)
        best = max(RECIPES, key=lambda row: _gain(found, row))
        print(f"{best} goes on: { ({row: round(_gain(found, row), 4) for row in RECIPES}) }")
        later = _played(Path(folder), list(range(1, SEEDS)), (best,))
    figures: dict[str, Any] = {"seeds": SEEDS, "steps": STEPS, "recipe": best, "data_sets": {}}
    for world, suffix in WORLDS.items():
        for data_set, times in ((f"online, {world}", found), (f"online, {world}, later", later)):
            rows = dict.fromkeys(row for row, *_ in times)
            figures["data_sets"][data_set] = {
                row: gain_row(times, row, world, PLACES) for row in rows
            }
        of = "gain_of_delayed_oracle"
        named = suffix or "_of_delayed_oracle"
        for key, row in ((f"gain{named}", best), (f"rule_gain{named}", RULE)):
            mine = gain_row(later, row, world, PLACES)
            figures |= {f"{key}{end}": mine[f"{of}{end}"] for end in ("", "_lo", "_hi")}
    write_result("online", figures)


def _played(folder: Path, seeds: Sequence[int], recipes: Sequence[str]) -> Times:
    """Time of every row, in each place on each seed."""
    jobs = []
    for seed in seeds:
        for index, place in enumerate(PLACES):
            settings = [f"places={ALL_PLACES[place].text}", f"steps={STEPS}"]
            others = {name: partial(_trained, name, settings, seed) for name in recipes}
            jobs.append((folder / f"{index}-{seed}", place, seed, others))
    found: Times = {}
    for (_, place, seed, _), rows in parallel(play_place, jobs):
        print(place, seed, {row: round(float(us.mean())) for row, us in rows.items()}, flush=True)
        for (row, world), times in rows.items():
            found.setdefault((row, world, place), []).append(times)
    return found


def _trained(name: str, settings: Sequence[str], seed: int, data: Path) -> TorchPolicy:
    began = time.monotonic()
    policy = trained(data, name, settings, seed)
    print(f"{name} in {settings[0]}, seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    return policy


def _gain(found: Times, row: str) -> float:
    """Mean over places of the share of NCCL's time that is saved."""
    world = "as recorded"
    gains = []
    for place in PLACES:
        mine, usual = (np.sum(found[name, world, place]) for name in (row, NCCL))
        gains.append(1.0 - mine / usual)
    return float(np.mean(gains))


if __name__ == "__main__":
    main()
