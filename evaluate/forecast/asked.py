"""Reads the inputs of a forecast: traces, a sweep or a simulated system, a policy."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dynamiccl.datasets.cells import run_names
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.forecast.forecast import Forecast, forecast
from dynamiccl.evaluate.forecast.gains import Measured, Source
from dynamiccl.evaluate.forecast.modelled import Modelled
from dynamiccl.evaluate.forecast.picks import Choose, policy_choice
from dynamiccl.evaluate.forecast.reading import read_job
from dynamiccl.nccl import Config
from dynamiccl.simulator.systems import find_system


@dataclass(frozen=True, slots=True)
class ForecastInputs:
    """The inputs of a forecast."""

    #: A data directory with a sweep; None: the simulated system `system`.
    data: Path | None
    #: Which system of `data`, where it has several.
    system: str | None
    policy: str | None
    tracking_uri: str
    #: (nodes, ranks a node) of process groups, and GPUs of a node, where the trace does not say.
    groups: Sequence[tuple[int, int]]
    ranks_per_node: int | None
    least: float


def look_ahead(traces: Sequence[Path], asked: ForecastInputs) -> Forecast:
    """Read the inputs, and forecast. Raises what the readers raise."""
    frame = None if asked.data is None else read(asked.data)
    simulated = find_system(asked.system or "") if frame is None else None
    job = read_job(traces, asked.ranks_per_node)
    loaded, configs, runs = None, tuple[Config, ...](), set[str]()
    if asked.policy is not None:
        from dynamiccl.train.policy import TorchPolicy
        from dynamiccl.train.tracking import policy_directory

        loaded = TorchPolicy.load(policy_directory(asked.policy, asked.tracking_uri))
        configs, runs = loaded.manifest.actions().configs, set(loaded.manifest.runs)
    source: Source
    if simulated is not None:
        source = Modelled(simulated, configs)
    elif frame is not None:
        source = Measured(frame, asked.system, job.nccl_version)
    choose: Choose | None = None if loaded is None else policy_choice(loaded, source.system)
    return forecast(
        job,
        source,
        groups=asked.groups,
        policy=choose,
        seen=frame is not None and bool(runs & set(run_names(frame))),
        least=asked.least,
        modelled=frame is None,
    )
