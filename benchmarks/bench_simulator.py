"""Figures of the simulator: speed, agreement with NCCL's choices, held-out errors of fits.

    python benchmarks/bench_simulator.py

Parts: simulator_speed.py, simulator_default.py, simulator_fit.py; each runs by itself, too, and
shows more. The last two compare with recorded decisions and published sweeps that do not ship with
the project; without them their figures are null. Writes out/bench/simulator.json.
"""

import simulator_default
import simulator_fit
import simulator_speed
from harness import write_result

from dynamiccl.errors import MissingPath

#: Bars: what each figure has to reach.
LEAST = {
    "collectives_per_s_per_core": 1_000_000.0,
    "steps_with_observation_per_s_per_core": 300_000.0,
    "default_agreement": 0.95,
}


def main() -> None:
    """Measure and write."""
    found: dict[str, float | int | str | None] = {**simulator_speed.figures()}
    for part in (simulator_default, simulator_fit):
        try:
            found |= part.figures()
        except MissingPath as error:
            # Named in the file, so that nobody takes it for a figure.
            found[f"{part.__name__}_not_measured"] = str(error)
    found |= {f"{name}_bar": bar for name, bar in LEAST.items()}
    write_result("simulator", found)
    for name, bar in LEAST.items():
        value = found.get(name)
        if isinstance(value, float) and value < bar:
            print(f"{name}: {value:,.4g} is below its bar of {bar:,.4g}")


if __name__ == "__main__":
    main()
