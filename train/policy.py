"""A trained policy: its TorchScript module, and what loads it.

E members of the ensemble, B batch, K calls in the window, W features of a call, F features of the
context, A actions, N observations
"""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from dynamiccl.datasets.features import CONTEXT_COLUMN, Observations
from dynamiccl.datasets.history import WINDOW_COLUMN, Float32Array
from dynamiccl.datasets.manifest import JUDGED_NAME, POLICY_NAME, Manifest
from dynamiccl.errors import CorruptFile, UserError
from dynamiccl.train.networks import MASKED_Q, Z_MAX, Z_MIN, Network


class PolicyModule(nn.Module):
    """(window_BKW, context_BF, mask_BA) -> (action_B int64, q_BA).

    The members' mean picks the best allowed action. Cold, it must undercut ABSTAIN in log time by
    more than `margin`; if unanimous, of each member, and by more than the context's noise band.
    Warm, the mean must by more than `warm_margin`: NCCL's own choice does not see congestion.
    """

    def __init__(
        self,
        members: Iterable[Network],
        margin: float,
        warm_margin: float,
        *,
        is_unanimous: bool = True,
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.margin = float(margin)
        self.is_unanimous = is_unanimous
        self.warm_margin = float(warm_margin)
        self.noise_band = CONTEXT_COLUMN["noise_band"]
        self.valid = WINDOW_COLUMN["valid"]
        self.masked_q = MASKED_Q
        self.z_min = Z_MIN
        self.z_max = Z_MAX

    def forward(
        self, window_BKW: torch.Tensor, context_BF: torch.Tensor, mask_BA: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(action_B, q_BA)."""
        z_list = [member(window_BKW, context_BF) for member in self.members]
        return self.choose(torch.stack(z_list), window_BKW, context_BF, mask_BA)

    @torch.jit.export
    def choose(
        self,
        z_EBA: torch.Tensor,
        window_BKW: torch.Tensor,
        context_BF: torch.Tensor,
        mask_BA: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Actions and Q values from each member's z."""
        z_BA = z_EBA.mean(dim=0)
        q_BA = (-torch.exp(z_BA.clamp(self.z_min, self.z_max))).masked_fill(
            mask_BA < 0.5, self.masked_q
        )
        best_B = z_BA.masked_fill(mask_BA < 0.5, float("inf")).argmin(dim=1)
        index_EB1 = best_B.view(1, -1, 1).expand(z_EBA.size(0), -1, 1)
        gain_EB = z_EBA[:, :, 0] - z_EBA.gather(2, index_EB1).squeeze(2)
        cold_B = window_BKW[:, -1, self.valid] < 0.5
        least_B = gain_EB.mean(dim=0)
        noise_B = torch.full_like(least_B, self.margin)
        if self.is_unanimous:
            least_B = torch.where(cold_B, gain_EB.min(dim=0)[0], least_B)
            noise_B = context_BF[:, self.noise_band].clamp(min=self.margin)
        threshold_B = torch.where(cold_B, noise_B, torch.full_like(noise_B, self.warm_margin))
        # Where ABSTAIN is not allowed there is nothing to fall back on.
        abstain_B = (least_B <= threshold_B) & (mask_BA[:, 0] > 0.5)
        action_B = torch.where(abstain_B, torch.zeros_like(best_B), best_B)
        return action_B, q_BA


class StatefulPolicyModule(PolicyModule):
    """A `PolicyModule` of one member that keeps a state for each job.

    A config that feels no interference tells nothing of its end: one of `probe_every` decisions is
    left to NCCL, counted in one unit of c more than the LSTM has. `forward` is for new jobs.
    """

    def __init__(self, member: Network, margin: float, warm_margin: float) -> None:
        super().__init__([member], margin, warm_margin, is_unanimous=False)
        trunk = member.trunk
        self.units = int(trunk.units)
        self.state_units = self.units + 1
        self.probe_every = int(trunk.probe_every)

    @torch.jit.export
    def step(
        self,
        window_BKW: torch.Tensor,
        context_BF: torch.Tensor,
        mask_BA: torch.Tensor,
        decided_B: torch.Tensor,
        h_BU: torch.Tensor,
        c_BU: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(action_B, q_BA, h, c) of B jobs; `decided` (B,): the key's last action, -1 = none."""
        since_B1 = c_BU[:, self.units :] + 1.0
        h_BU, c_BU = h_BU[:, : self.units], c_BU[:, : self.units]
        z_BA, h_BU, c_BU = self.members[0].step(window_BKW, context_BF, decided_B, h_BU, c_BU)  # type: ignore[operator]
        action_B, q_BA = self.choose(z_BA.unsqueeze(0), window_BKW, context_BF, mask_BA)
        if self.probe_every > 0:
            is_due_B1 = since_B1 >= self.probe_every
            probes_B = is_due_B1.squeeze(1) & (mask_BA[:, 0] > 0.5)
            action_B = torch.where(probes_B, torch.zeros_like(action_B), action_B)
            since_B1 = since_B1.masked_fill(is_due_B1, 0.0)
        h_BU = torch.cat([h_BU, torch.zeros_like(since_B1)], dim=1)
        return action_B, q_BA, h_BU, torch.cat([c_BU, since_B1], dim=1)


def save_script(module: torch.nn.Module, path: Path) -> None:
    """Script a module in eval mode and save it."""
    scripted = script(module)
    with ignored_deprecation():
        # torch's writer ends the process on a full disk (torch 2.13).
        path.write_bytes(scripted.save_to_buffer())


def script(module: torch.nn.Module) -> Any:
    """TorchScript, in eval mode."""
    with ignored_deprecation():
        return torch.jit.script(module.eval())


def load_script(path: Path) -> Any:
    """A saved module in eval mode; raises CorruptFile."""
    with ignored_deprecation():
        try:
            module = torch.jit.load(str(path), map_location="cpu")  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            raise CorruptFile(f"{path} is not a TorchScript file: {error}") from error
    return module.eval()


def load_trigger(path: Path) -> Any:
    """The module of a `trigger.pt`; raises CorruptFile."""
    module = load_script(path)
    if not hasattr(module, "new_state"):
        raise CorruptFile(
            f"{path} is TorchScript, but no trigger; give a run of 'dynamiccl-train trigger'"
        )
    return module


@contextmanager
def ignored_deprecation() -> Iterator[None]:
    """Without the warnings that TorchScript is deprecated."""
    with warnings.catch_warnings():
        # TorchScript: a DeprecationWarning in torch 2.13, a FutureWarning from 2.14 on.
        warnings.filterwarnings("ignore", r"`torch\.jit\.")
        yield


#: h and c of an LSTM, each (N, U).
State = tuple[Float32Array, Float32Array]


class TorchPolicy:
    """A TorchScript policy and its manifest."""

    def __init__(self, module: torch.nn.Module, manifest: Manifest) -> None:
        self._module = module
        self.manifest = manifest

    @classmethod
    def load(cls, directory: Path, *, judged: bool = False) -> "TorchPolicy":
        """Read and verify; `judged`: one that never saw the test part.

        Raises as `Manifest.read`, CorruptFile, and UserError for an artifact without the latter.
        """
        manifest = Manifest.read(directory)
        is_other = judged and manifest.saw_test
        path = directory / (JUDGED_NAME if is_other else POLICY_NAME)
        if is_other and not path.is_file():
            raise UserError(
                f"the policy of {directory} is fitted to all that was measured, so no size is new "
                f"to it; give the run (or what its gate wrote), which has {JUDGED_NAME} beside it"
            )
        return cls(load_script(path), manifest)

    @property
    def state_units(self) -> int:
        """Width of a job's h and c; 0 = stateless."""
        return int(getattr(self._module, "state_units", 0))

    def step(
        self,
        observations: Observations,
        mask: npt.NDArray[np.bool_],
        decided: npt.NDArray[np.int64],
        state: State,
    ) -> tuple[npt.NDArray[np.int64], State]:
        """(N,) decisions of N jobs about a key each, and their states, as the module's `step`."""
        module: Any = self._module
        with torch.no_grad():
            action, _, h, c = module.step(
                torch.from_numpy(observations.window),
                torch.from_numpy(observations.context),
                torch.from_numpy(mask.astype(np.float32)),
                torch.from_numpy(decided),
                *(torch.from_numpy(part) for part in state),
            )
        return action.numpy(), (h.numpy(), c.numpy())

    def values(self, observations: Observations, mask: npt.NDArray[np.bool_]) -> Float32Array:
        """(N, A) Q values; those of masked actions are far below."""
        return forward(self._module, observations, mask)[1]

    def least_gains(self, observations: Observations) -> npt.NDArray[np.float64] | None:
        """(N, A) gains over NCCL (ln) to be beaten: caution x spreads; None without spreads."""
        module: Any = self._module
        if not hasattr(module, "predict"):
            return None
        with torch.no_grad():
            _, spread, caution = module.predict(torch.from_numpy(observations.context))
        # Infinite caution times a spread of 0 would be NaN.
        found: torch.Tensor = caution.unsqueeze(1) * spread.clamp(min=1e-9)
        return found.double().numpy()

    def believed(self, observations: Observations) -> npt.NDArray[np.float64]:
        """(N, A) times over NCCL's own choice; NaN where too little was measured to tell."""
        module: Any = self._module
        if not hasattr(module, "believed"):
            shape = len(observations.context), len(self.manifest.catalogue)
            times = self.values(observations, np.ones(shape, dtype=np.bool_)).astype(np.float64)
            return times / times[:, :1]
        with torch.no_grad():
            found: torch.Tensor = module.believed(torch.from_numpy(observations.context))
        return found.exp().double().numpy()

    def act(self, observations: Observations, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """(N,) actions allowed by `mask` (N, A)."""
        return forward(self._module, observations, mask)[0]


def forward(
    module: torch.nn.Module, observations: Observations, mask: npt.NDArray[np.bool_]
) -> tuple[npt.NDArray[np.int64], Float32Array]:
    """Actions (N,) and Q values (N, A) of a module."""
    with torch.no_grad():
        action, q = module(
            torch.from_numpy(observations.window),
            torch.from_numpy(observations.context),
            torch.from_numpy(mask.astype(np.float32)),
        )
    return action.numpy(), q.numpy()
