"""Training curves of a policy from its MLflow run; logs reports as artifacts of the run."""

import json
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from dynamiccl.evaluate.blocks import FigureBlock
from dynamiccl.evaluate.figures.drawing import svg_text
from dynamiccl.train import SUMMARY_NAME, tracking
from dynamiccl.train.plots import training_curves


@dataclass(frozen=True, slots=True)
class Training:
    """The curves of a training run; regrets are fractions."""

    run_id: str
    #: Gradient step -> mean training loss of the epoch that ended there.
    losses: dict[int, float]
    #: Gradient step -> mean regret on the validation bins.
    regrets: dict[int, float]
    #: That of NCCL's default, and the step of the exported weights; None before the run ended.
    default_regret: float | None
    best_step: int | None

    @classmethod
    def read(cls, run_id: str, tracking_uri: str) -> Self:
        """From the run's metrics and summary; raises UserError for an unfinished run."""
        run = tracking.reopen_run(tracking_uri, run_id)
        default = run.history("default_validation_regret")
        text = tracking.read_text(tracking_uri, run_id, SUMMARY_NAME)
        best_step = None if text is None else json.loads(text).get("best_step")
        return cls(
            run_id,
            run.history("loss"),
            run.history("validation_regret"),
            next(reversed(default.values()), None),
            best_step,
        )

    def block(self, policy: str) -> FigureBlock:
        """The curves as a figure block."""
        text = "Training loss, and mean regret on the validation bins, by gradient step"
        if self.best_step is not None:
            text += f"; the weights of step {self.best_step} were exported (dotted line)"
        if self.default_regret is not None:
            text += f"; NCCL's default has {self.default_regret:.2%} there (dashed line)"
        curves: dict[str, Sequence[float]] = {
            "step": list(self.losses),
            "loss": list(self.losses.values()),
            "validation_regret": list(self.regrets.values()),
        }
        figure = training_curves(
            curves, best_step=self.best_step, default_regret=self.default_regret
        )
        title = f"Learning curves of {policy}"
        return FigureBlock(title, f"training-{policy}", svg_text(figure), f"{text}.")


def log_report(files: Iterable[Path], run_id: str, tracking_uri: str, data_hash: str) -> str:
    """Copy a report's files to `report/HASH` in a run's artifacts; returns that path.

    One report a data set: a later one of the same data replaces it.
    """
    place = f"report/{data_hash[:12]}"
    with tempfile.TemporaryDirectory() as scratch:
        for path in files:
            if path.is_dir():
                shutil.copytree(path, Path(scratch) / path.name)
            else:
                shutil.copy(path, scratch)
        tracking.reopen_run(tracking_uri, run_id).log_folder(Path(scratch), place)
    return place
