"""Window encoders: padding says nothing, and all of them are TorchScript."""

import pytest
import torch

from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.errors import UserError
from dynamiccl.train.encoders import WINDOW_ENCODERS, Trunk, register_window_encoder

SHAPE, FEATURES = (8, 5), 6
VALID = WINDOW_COLUMN["valid"]
RECURRENT = ("lstm", "gru")


class Flat(torch.nn.Module):
    """Somebody's own, which says another width than it has."""

    width = 7

    def __init__(self, _shape: tuple[int, int]) -> None:
        super().__init__()

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        return window.flatten(1)


class Unscripted(Flat):
    """TorchScript has no try."""

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        try:
            return window.flatten(1)
        finally:
            self.width = 40


class TooNarrow(Flat):
    """A layer takes another number of features than a call has."""

    def __init__(self, _shape: tuple[int, int]) -> None:
        super().__init__(_shape)
        self.layer = torch.nn.Linear(32, 7)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(window)
        return made.sum(dim=1)


def window(valid: int, seed: int = 0) -> torch.Tensor:
    """Three windows with so many calls each, right-aligned."""
    made = torch.randn(3, *SHAPE, generator=torch.Generator().manual_seed(seed))
    made[:, :, VALID] = 1.0
    made[:, : SHAPE[0] - valid] = 0.0
    return made


def make_trunk(name: str) -> Trunk:
    torch.manual_seed(0)
    return Trunk(SHAPE, FEATURES, [16], name)


@pytest.mark.parametrize("name", WINDOW_ENCODERS)
def test_every_encoder_scripts_and_looks_at_the_window(name: str) -> None:
    trunk = make_trunk(name)
    context = torch.ones(3, FEATURES)
    scripted = torch.jit.script(trunk)
    for valid in (0, 3, 8):
        torch.testing.assert_close(scripted(window(valid), context), trunk(window(valid), context))
    different = trunk(window(8, seed=1), context) - trunk(window(8, seed=2), context)
    assert different.abs().min() > 0.0


@pytest.mark.parametrize("name", WINDOW_ENCODERS)
def test_all_weights_learn(name: str) -> None:
    trunk = make_trunk(name)
    mixed = torch.cat([window(0), window(4), window(8)])
    trunk(mixed, torch.ones(9, FEATURES)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in trunk.parameters())


@pytest.mark.parametrize("name", RECURRENT)
def test_a_cold_window_has_no_state(name: str) -> None:
    encoder = WINDOW_ENCODERS[name](SHAPE)
    mixed = torch.cat([window(0), window(8)])
    state = encoder(mixed)
    assert not state[:3].any()
    torch.testing.assert_close(state[3:], encoder(window(8)))


@pytest.mark.parametrize("name", RECURRENT)
def test_a_state_remembers_the_order_of_calls(name: str) -> None:
    encoder = WINDOW_ENCODERS[name](SHAPE)
    calls = window(8)
    assert (encoder(calls) - encoder(calls.flip(1))).abs().max() > 1e-3


@pytest.mark.parametrize("name", WINDOW_ENCODERS)
def test_calls_are_scaled_and_padding_says_nothing(name: str) -> None:
    trunk, plain = make_trunk(name), make_trunk(name)
    mean = torch.tensor([0.0, 10.0, -3.0, 0.0, 5.0])
    scale = torch.tensor([1.0, 4.0, 2.0, 1.0, 0.1])
    trunk.window_mean.copy_(mean)
    trunk.window_scale.copy_(scale)
    context = torch.ones(3, FEATURES)
    for valid in (0, 3, 8):
        calls = window(valid)
        raw = (calls * scale + mean) * calls[:, :, [VALID]]  # padding is zeros as ever
        torch.testing.assert_close(trunk(raw, context), plain(calls, context))


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (Flat, r"'own' makes a tensor \[2, 40\] of 2 windows, and its width is 7: self.width must"),
        (Unscripted, "window encoder 'own': UnsupportedNodeError: try blocks"),
        (
            TooNarrow,
            r"RuntimeError: mat1 and mat2 shapes .* given windows \(2, 8, 5\): \(windows, ca",
        ),
    ],
)
def test_an_own_encoder_that_cannot_be_trained_and_exported_is_told_before(
    own: type[Flat], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dynamiccl.train.encoders.WINDOW_ENCODERS", dict(WINDOW_ENCODERS))
    register_window_encoder("own", own)
    with pytest.raises(UserError, match=said) as caught:
        make_trunk("own")
    assert "\n" not in str(caught.value)
