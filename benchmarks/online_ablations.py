"""What each part of online learning is worth: the ablations of the papers that it comes from.

    python benchmarks/online_ablations.py            # an hour and a half on 2 cores
    python benchmarks/online_ablations.py blocking   # a part: variants, tabular or blocking

All learn and play in `PLACE`, where surroundings come and go, so that what the state shows counts.

* variants: A3C (Mnih et al. 2016) with a change each, `STEPS` updates, `SEEDS` seeds. Histories of
  1 to 4 calls, as zeros where the older ones stand (8 is the window's length); windows read by a
  1-D convolution or an LSTM (Pensieve, Mao et al. 2017, section 5.1), or not at all; no decisions
  shown to the critic, although they act late (mvfst-rl, Sivakumar et al. 2019); a statistic of
  RMSProp for each actor; other scales of rewards; no variation of episodes.
* tabular: Q-learning over a table of each key's last slowdown (Pensieve's comparison), DQN from
  recorded calls, a random policy, and the fitted rule.
* blocking: what calls take that wait for a policy of 0.1, 1 and 10 ms, and decide at once, beside
  calls that do not wait and whose decisions are in force when ranks have agreed.

Figures are shares of the delayed oracle's gain, as in bench_online.py. Writes
out/bench/online-ablations.json.
"""

import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from harness import OUT, write_result
from learning_figures import parallel
from learning_scenarios import (
    RULE,
    fitted_rule,
    gain_row,
    prepare_place,
    setting_of,
    shifted,
    times_us,
)
from online_tabular import Tabular, train_table
from scenario_rivals import Random
from torch import nn

from dynamiccl.evaluate.simulate.lineup import (
    DELAYED,
    NCCL,
    Contender,
    Setting,
    policy_contenders,
    simple_contenders,
)
from dynamiccl.train.encoders import WINDOW_ENCODERS, FlatWindow, register_window_encoder
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import make_recipe
from dynamiccl.train.trigger.detector import Detector

PLACE: Final = "b300, decode and lora, busy-host"
AT: Final = "b300-nvlink:decode+lora:busy-host:1x8"
STEPS: Final = 300
SEEDS: Final = 3
#: Of 64 jobs with 30,000 calls each: some 5.8 million calls, as in `STEPS` updates.
TABLE_EPISODES: Final = 3
LATENCIES_MS: Final = (0.1, 1.0, 10.0)
BASE: Final = "a3c"
#: By name: recipe, and what is set.
VARIANTS: Final[Mapping[str, tuple[str, tuple[str, ...]]]] = MappingProxyType(
    {
        BASE: ("a3c", ()),
        "no window": ("a3c", ("window_encoder=last-0",)),
        "the last call": ("a3c", ("window_encoder=last-1",)),
        "the last 2 calls": ("a3c", ("window_encoder=last-2",)),
        "the last 4 calls": ("a3c", ("window_encoder=last-4",)),
        "1-D convolution over the window": ("a3c", ("window_encoder=cnn",)),
        "LSTM over the window": ("a3c", ("window_encoder=lstm",)),
        "LSTM as old as the job": ("a3c-lstm", ()),
        "critic sees no decisions": ("a3c", ("seen_decisions=0",)),
        "a statistic of RMSProp each": ("a3c", ("shared_statistic=false",)),
        "reward: raw": ("a3c", ("reward_scale=raw",)),
        "reward: reference": ("a3c", ("reward_scale=reference",)),
        "reward: clipped": ("a3c", ("reward_scale=clipped",)),
        "episodes do not differ": ("a3c", ("vary=1", "vary_times=0")),
    }
)
WORLDS: Final = ("as recorded", "shifted")
Rows = dict[tuple[str, str], npt.NDArray[np.float64]]
Times = dict[tuple[str, str, str], list[npt.NDArray[np.float64]]]


class LastCalls(nn.Module):
    """The last `calls` calls of the window as they are; the older ones are not seen."""

    def __init__(self, calls: int, window_shape: Sequence[int]) -> None:
        """Nothing to learn."""
        super().__init__()
        self.flat = FlatWindow((calls, window_shape[1]))
        self.first = int(window_shape[0]) - calls
        self.width = self.flat.width

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        """(B, K, W) -> (B, calls x W)."""
        return self.flat(window[:, self.first :])  # type: ignore[no-any-return]


def _register() -> None:
    for calls in (0, 1, 2, 4):
        if f"last-{calls}" not in WINDOW_ENCODERS:
            register_window_encoder(f"last-{calls}", partial(LastCalls, calls))


def _rivals(setting: Setting, world: str) -> tuple[Setting, dict[str, Contender]]:
    if world == "shifted":
        setting = replace(setting, scenario=shifted(setting.scenario))
    return setting, {row.name: row for row in simple_contenders(setting)}


def _prepared(folder: Path, seed: int) -> Rows:
    """NCCL, the delayed oracle, a random policy and the fitted rule, once for each seed."""
    setting = prepare_place(folder, PLACE, seed)
    rule = fitted_rule(setting, folder)
    found: Rows = {}
    for world in WORLDS:
        here, rows = _rivals(setting, world)
        rows["random"] = replace(rows[DELAYED], make=Random)
        rows[RULE] = replace(rows[DELAYED], make=rule)
        for name in (NCCL, DELAYED, "random", RULE):
            found[name, world] = times_us(rows[name], here, seed)
    return found


def _variant(folder: Path, seed: int, name: str) -> Rows:
    """Train a variant, and play."""
    _register()
    recipe, settings = VARIANTS[name]
    policy = _trained(folder, recipe, seed, [*settings, f"steps={STEPS}", f"places={AT}"])
    return _played(policy, name, seed)


def _trained(folder: Path, recipe: str, seed: int, settings: Sequence[str]) -> TorchPolicy:
    with tempfile.NamedTemporaryFile(dir=folder, suffix=".db", delete=False) as store:
        uri = f"sqlite:///{store.name}"
    made = make_recipe(recipe, settings)
    done = fit(folder / "data", made, experiment="online", tracking_uri=uri, seed=seed)
    return TorchPolicy.load(Path(done.run_directory) / "policy")


def _played(policy: TorchPolicy, name: str, seed: int, watch: Path | None = None) -> Rows:
    make_watch = None if watch is None else partial(Detector.load, watch)
    found: Rows = {}
    for world in WORLDS:
        here, _ = _rivals(setting_of(PLACE), world)
        row = policy_contenders(here, name, policy, make_watch)[0]
        found[name, world] = times_us(row, here, seed)
    return found


def _tabular(folder: Path, seed: int) -> Rows:
    """A table that learns in as many calls as A3C has, and DQN from the recorded calls."""
    setting = setting_of(PLACE)
    trained = _rivals(setting, "as recorded")[1][DELAYED]
    env, _ = trained.prepare(replace(setting, jobs=64), seed)
    values = train_table(env, TABLE_EPISODES, seed)
    found: Rows = {}
    for world in WORLDS:
        here, rows = _rivals(setting, world)
        row = replace(rows[DELAYED], make=lambda env, seed: Tabular(env, values, seed=seed))
        found["tabular Q-learning", world] = times_us(row, here, seed)
    settings = [f"trigger={folder}", "gamma=0.5", "num_steps=3", "steps=2000"]
    policy = _trained(folder, "dqn", seed, settings)
    return found | _played(policy, "DQN from recorded calls, + Trigger", seed, folder)


def _blocking(folder: Path) -> dict[str, Any]:
    """Seconds that one job's calls take, by how long the policy takes and whether calls wait."""
    policy = _trained(folder, BASE, 0, [f"steps={STEPS}", f"places={AT}"])
    setting = setting_of(PLACE)
    _, rows = _rivals(setting, "as recorded")
    usual = times_us(rows[NCCL], setting, 0).sum()
    [row] = policy_contenders(setting, BASE, policy, None)
    saved = {"does not wait": 1.0 - times_us(row, setting, 0).sum() / usual}
    at_once = times_us(replace(row, at_once=True), setting, 0).sum()
    calls = setting.calls * setting.jobs
    for latency_ms in LATENCIES_MS:
        waited = at_once + calls * latency_ms * 1000.0
        saved[f"waits {latency_ms:g} ms a call"] = 1.0 - waited / usual
    return {name: float(value) for name, value in saved.items()}


def _add(found: Times, rows: Rows) -> None:
    for (row, world), us in rows.items():
        found.setdefault((row, world, PLACE), []).append(us)


def main() -> None:
    """The parts that are named, or all."""
    parts = sys.argv[1:] or ["variants", "tabular", "blocking"]
    path = OUT / "online-ablations.json"
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    figures: dict[str, Any] = {"parts": known.get("parts", {})}
    found: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        at = {seed: Path(folder) / str(seed) for seed in range(SEEDS)}
        for _, rows in parallel(_prepared, [(at[seed], seed) for seed in at]):
            _add(found, rows)
        if "variants" in parts:
            jobs = [(at[seed], seed, name) for seed in at for name in VARIANTS]
            for (_, seed, name), rows in parallel(_variant, jobs):
                print(f"{name}, seed {seed}", flush=True)
                _add(found, rows)
        if "tabular" in parts:
            for _, rows in parallel(_tabular, [(at[seed], seed) for seed in at]):
                _add(found, rows)
        if "blocking" in parts:
            figures["blocking"] = _blocking(at[0])
    for part in parts:
        rows_of = [row for row, _, _ in found] if part != "blocking" else []
        figures["parts"][part] = {
            world: {row: gain_row(found, row, world, (PLACE,)) for row in dict.fromkeys(rows_of)}
            for world in WORLDS
        }
    write_result("online-ablations", {**known, **figures})


if __name__ == "__main__":
    main()
