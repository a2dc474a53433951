"""The simulator as a runner: the same rows as a real sweep, marked `source = simulator`."""

from collections.abc import Sequence
from datetime import UTC, datetime

from dynamiccl.collect.runner import Row
from dynamiccl.collect.simulator import h100
from dynamiccl.collect.simulator.noise import Noise
from dynamiccl.collect.sweep import SweepFile, Trial
from dynamiccl.collect.trial_rows import infeasible_row, trial_row
from dynamiccl.datasets.schema import Source, Statistic
from dynamiccl.errors import InvalidSweep
from dynamiccl.nccl import ABSTAIN, Algorithm, Protocol


class SimulatorRunner:
    """Measures in the H100 + InfiniBand model; needs no GPU, no NCCL and no network."""

    def __init__(self, file: SweepFile) -> None:
        """Take the sweep's simulator settings."""
        settings = file.simulator
        self._file = file
        self._noise = Noise(
            settings.seed,
            settings.noise_sigma,
            settings.tail_probability,
            settings.drift_sigma,
        )

    def check(self, trials: Sequence[Trial]) -> None:
        """Refuse groups, collectives and channel counts that the model does not hold."""
        known = h100.groups()
        for trial in trials:
            group = h100.Group(trial.num_nodes, trial.ranks_per_node)
            if group not in known:
                shapes = ", ".join(f"{g.num_nodes}x{g.ranks_per_node}" for g in known)
                raise InvalidSweep(
                    f"the simulator has no group of {trial.num_nodes} nodes x "
                    f"{trial.ranks_per_node} ranks; choose from {shapes}"
                )
            if trial.collective not in h100.collectives():
                names = ", ".join(c.wire for c in h100.collectives())
                raise InvalidSweep(
                    f"the simulator has no {trial.collective.wire}; choose from {names}"
                )
            if trial.config.num_channels is not None:
                raise InvalidSweep(
                    "the simulator has no channel counts yet: num_channels must be [0] (AUTO), "
                    f"not {trial.config.num_channels}"
                )

    def measure(self, trial: Trial, *, run: str, repeat: int) -> list[Row]:
        """Simulate one call; out-of-place only."""
        row = trial_row(self._file, trial, run=run, repeat=repeat)
        row |= h100.ENVIRONMENT
        row |= {
            "source": Source.SIMULATOR.value,
            "timestamp": datetime.now(UTC),
            "in_place": False,
            "exclusive_node": True,
        }
        group = h100.Group(trial.num_nodes, trial.ranks_per_node)
        if trial.infeasible is not None:
            return [infeasible_row(row, trial.infeasible)]
        config = trial.config
        if config == ABSTAIN:
            config = h100.default_config(group, trial.collective, trial.size_bytes)
        if config.algorithm is None or config.protocol is None:
            return [infeasible_row(row, "the simulator needs both algorithm and protocol")]
        cell = (config.algorithm, config.protocol)
        if cell not in h100.cells(group, trial.collective):
            return [infeasible_row(row, f"NCCL has no {config.key} for this group")]
        return [{**row, **self._result(trial, group, cell, run)}]

    def _result(
        self,
        trial: Trial,
        group: h100.Group,
        cell: tuple[Algorithm, Protocol],
        run: str,
    ) -> Row:
        quiet_us = h100.true_us(
            group, trial.collective, *cell, trial.size_bytes, congestion=trial.congestion
        )
        time_us = quiet_us * self._noise.factor(run, trial.key)
        algbw = trial.size_bytes / (1000.0 * time_us)
        return {
            "actual_algorithm": cell[0].wire,
            "actual_protocol": cell[1].wire,
            "verified": True,
            "statistic": Statistic.MEAN.value,
            "time_us": time_us,
            "algbw_gbytes_per_s": algbw,
            "busbw_gbytes_per_s": algbw * trial.collective.bus_factor(group.num_ranks),
            "wrong_values": 0,
        }
