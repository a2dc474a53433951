"""Trains the forecaster on quiet calls with injected slowdowns; the target is the quiet time.

The module runs as it will be deployed, its history frozen while a sum is above zero, so that the
LSTM learns what is worth knowing of a history with holes in it. What it must not learn is to follow
a slowdown, and there the target says no.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from dynamiccl.train.trigger.module import WARM_UP, TriggerModule
from dynamiccl.train.trigger.series import Series

#: Gradients go back over so many calls.
_CHUNK: Final = 40
_CHUNKS: Final = 8
_WIDTH: Final = 192
#: Steps between two looks at calls that are not trained on.
_LOOK: Final = 20
#: Calls of each stream by which a forecast is judged.
JUDGED_CALLS: Final = 1_000
_LEARNING_RATE: Final = 5e-3
#: Slowdowns that are put in: factors, and calls that they last, both log-uniform.
_SLOWEST: Final = 3.0
_LONGEST: Final = 200.0
_SLOWED: Final = 0.5
#: Told after each step: the step, of how many, and its loss.
Told = Callable[[int, int, float], None]


@dataclass(frozen=True, slots=True)
class Training:
    """The losses of a training, and `forecast_error` on held-out series."""

    #: Of each step, in scales.
    losses: list[float]
    #: Before any step, when the forecast is the level alone.
    level_error: float
    #: Of the state that was kept.
    error: float


def train(
    module: TriggerModule,
    series: Series,
    held_out: Series,
    *,
    steps: int,
    seed: int,
    told: Told = lambda _step, _steps, _loss: None,
) -> Training:
    """Fit the LSTM.

    What is kept is the state with the least error on quiet calls of `held_out`: the untrained one,
    whose forecast is the level alone, where nothing can be learned.
    """
    level_error = forecast_error(module, held_out, seed=seed)
    best = (level_error, _weights(module))
    random = np.random.default_rng(seed)
    optimizer = torch.optim.Adam(module.parameters(), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(steps, 1))
    losses = []
    module.train()
    for step in range(steps):
        streams = _streams(series, random)
        state = module.new_state(_WIDTH)
        total = 0.0
        for chunk in range(_CHUNKS):
            optimizer.zero_grad()
            state, loss = _loss(module, state.detach(), streams, chunk)
            loss.backward()
            nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            optimizer.step()
            total += loss.item()
        schedule.step()
        losses.append(total / _CHUNKS)
        told(step + 1, steps, losses[-1])
        if (step + 1) % _LOOK == 0 or step + 1 == steps:
            error = forecast_error(module, held_out, seed=seed)
            best = min(best, (error, _weights(module)), key=lambda each: each[0])
    module.load_state_dict(best[1])
    module.eval()
    return Training(losses, level_error, best[0])


def _weights(module: TriggerModule) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def forecast_error(module: TriggerModule, series: Series, *, seed: int) -> float:
    """Mean absolute error of the forecast on quiet calls of a series, in scales."""
    random = np.random.default_rng(seed)
    values, sizes, scales = series.draw(random, _WIDTH, JUDGED_CALLS)
    times = torch.from_numpy(values * scales + np.float32(5.0))
    state, errors = module.new_state(_WIDTH), []
    with torch.inference_mode():
        for number, (time, size) in enumerate(zip(times, torch.from_numpy(sizes), strict=True)):
            state, _, _, forecast = module.step(state, time, size)
            if number >= WARM_UP:
                errors.append(((time - forecast).abs() / torch.from_numpy(scales)).mean().item())
    return float(np.mean(errors))


def _streams(series: Series, random: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """Times, sizes, quiet times (each (steps, width)) and scales (width,)."""
    steps = WARM_UP + _CHUNK * _CHUNKS
    values, sizes, scales = series.draw(random, _WIDTH, steps)
    quiet = values * scales + random.uniform(1.0, 12.0, _WIDTH).astype(np.float32)
    onset = random.integers(WARM_UP, steps, _WIDTH)
    length = np.exp(random.uniform(0.0, np.log(_LONGEST), _WIDTH))
    factor = np.exp(random.uniform(0.0, np.log(_SLOWEST), _WIDTH))
    factor = np.where(random.random(_WIDTH) < _SLOWED, factor, 1.0)
    at = np.arange(steps)[:, None]
    slow = (at >= onset) & (at < onset + length)
    times = quiet + np.where(slow, np.log(factor), 0.0).astype(np.float32)
    return tuple(torch.from_numpy(np.ascontiguousarray(a)) for a in (times, sizes, quiet, scales))


def _loss(
    module: TriggerModule, state: torch.Tensor, streams: tuple[torch.Tensor, ...], chunk: int
) -> tuple[torch.Tensor, Any]:
    times, sizes, quiet, scales = streams
    first = WARM_UP + _CHUNK * chunk
    if chunk == 0:
        with torch.no_grad():
            for at in range(WARM_UP):
                state, _, _ = module(state, times[at], sizes[at])
    losses = []
    for at in range(first, first + _CHUNK):
        state, _, _, forecast = module.step(state, times[at], sizes[at])
        # Absolute errors: what is forecast is the median, as heavy tails ask for.
        losses.append(((quiet[at] - forecast) / scales).abs().clamp(max=5.0).mean())
    return state, torch.stack(losses).mean()
