"""TorchScript, touched only while an artifact is made or verified; torch is imported then."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from dynamiccl.datasets.features import Observations
from dynamiccl.errors import CorruptFile, MachineError


class ScriptedPolicy:
    """A loaded `policy.pt`."""

    def __init__(self, path: Path) -> None:
        """Load it; raises MachineError without torch, and CorruptFile for another kind of file."""
        try:
            import torch
        except ImportError as error:
            raise MachineError(
                "making or verifying tables needs torch; install it with "
                "'pip install dynamiccl[train]', or do this step where you train"
            ) from error
        self._torch = torch
        with warnings.catch_warnings():
            # TorchScript is deprecated from torch 2.13 on and is still what libtorch loads.
            warnings.simplefilter("ignore", DeprecationWarning)
            try:
                self._module: Any = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
            except RuntimeError as error:
                raise CorruptFile(f"{path} is not a TorchScript file: {error}") from error

    def act(self, observations: Observations, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """(N,) actions for N observations, among those that `mask` (N, A) allows."""
        torch = self._torch
        with torch.no_grad():
            action, _ = self._module(
                torch.from_numpy(observations.window),
                torch.from_numpy(observations.context),
                torch.from_numpy(mask.astype(np.float32)),
            )
        chosen: npt.NDArray[np.int64] = action.numpy()
        return chosen
