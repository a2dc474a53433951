"""Entries of the benchmark: recipes, baselines, tables, scripts and trained policies."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dynamiccl.datasets.costs import read_costs
from dynamiccl.datasets.store import slug
from dynamiccl.errors import UnknownName, UserError
from dynamiccl.evaluate.baselines.costs import CostTimesResidual
from dynamiccl.evaluate.lineup import BASELINES
from dynamiccl.evaluate.policies import Actions, LearnedPolicy
from dynamiccl.evaluate.worlds.draws import TRAIN_FOLDER, Draw
from dynamiccl.evaluate.worlds.nvidia_csv import SUFFIX, table_actions
from dynamiccl.evaluate.worlds.script import script_actions
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipes import RECIPES, make_recipe
from dynamiccl.train.tracking import policy_directory

_STORE_NAME: Final = "mlflow.db"
_RUN_ID_DIGITS: Final = 32
#: What else an entry can be, for an error.
_OTHERS: Final = (CostTimesResidual.name, "TABLE.csv", "SCRIPT", "RUN_OR_ARTIFACT")


@dataclass(frozen=True, slots=True)
class Entry:
    """Something that answers a draw's questions."""

    name: str
    #: (T,) an action for each task of a draw; files are kept in the folder.
    answer: Callable[[Draw, Path], Actions]

    @property
    def folder(self) -> str:
        """Name of the folder of its answers."""
        return slug(self.name)


def find_entry(text: str, tracking_uri: str, limit_s: float) -> Entry:
    """The entry named `text`; a script may take `limit_s` seconds for a draw.

    Raises UnknownName for an unknown name, UserError for a script that cannot be executed, and
    MissingPath for a missing policy.
    """
    if text in BASELINES:
        return baseline(text)
    if text == CostTimesResidual.name:
        return Entry(text, _corrected)
    if text in RECIPES:
        return Entry(text, partial(_trained, text))
    path = Path(text)
    if path.suffix == SUFFIX:
        return Entry(path.stem, lambda draw, _: table_actions(_placed(text, draw), draw))
    if path.is_file():
        if not os.access(path, os.X_OK):
            raise UserError(f"{path} is not executable; run 'chmod +x {path}'")
        return Entry(path.name, lambda draw, out: script_actions(path, draw, out, limit_s))
    if not (path.is_dir() or ":/" in text or len(text) == _RUN_ID_DIGITS):
        raise UnknownName("entry", text, [*RECIPES, *BASELINES, *_OTHERS])
    policy = TorchPolicy.load(policy_directory(text, tracking_uri))
    return Entry("policy", lambda draw, _: _asked(policy, draw))


def baseline(name: str) -> Entry:
    """A baseline of the report."""

    def answer(draw: Draw, _: Path) -> Actions:
        made = BASELINES[name](draw.training, draw.validation, draw.catalogue)
        return made.choose(draw.asked)

    return Entry(name, answer)


def _corrected(draw: Draw, _: Path) -> Actions:
    costs = read_costs(draw.folder / TRAIN_FOLDER)
    return CostTimesResidual(draw.training, draw.catalogue, costs).choose(draw.asked)


def _trained(name: str, draw: Draw, folder: Path) -> Actions:
    """The actions of a recipe trained on the draw, with the draw's number as seed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = fit(
        draw.folder / TRAIN_FOLDER,
        make_recipe(name),
        experiment=draw.world,
        tracking_uri=f"sqlite:///{(folder / _STORE_NAME).resolve()}",
        seed=draw.number,
    )
    return _asked(TorchPolicy.load(policy_directory(done.run_directory, "")), draw)


def _asked(policy: TorchPolicy, draw: Draw) -> Actions:
    return LearnedPolicy(policy, draw.catalogue, "policy").choose(draw.asked)


def _placed(text: str, draw: Draw) -> Path:
    return Path(text.replace("{world}", draw.world).replace("{draw}", str(draw.number)))
