"""MLflow stores for tests: copies of an empty one, since creating one takes five seconds."""

import shutil
from functools import cache
from pathlib import Path

from tests.once import locked

ROOT = Path(__file__).resolve().parents[1] / "out" / "test-stores"


def new_store(folder: Path) -> str:
    """URI of an empty store in `folder`, where the commands look for their default one."""
    shutil.copyfile(_empty(), folder / "mlflow.db")
    return uri_of(folder)


def uri_of(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


@cache
def _empty() -> Path:
    """The store that is copied, one for each version of MLflow."""
    import mlflow
    from mlflow import MlflowClient

    path = ROOT / f"{mlflow.__version__}.db"
    with locked(ROOT / "lock"):
        if not path.exists():
            making = path.with_suffix(".making")
            making.unlink(missing_ok=True)
            MlflowClient(f"sqlite:///{making}").search_experiments()
            making.rename(path)
    return path
