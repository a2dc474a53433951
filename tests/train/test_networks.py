"""Window encoders, the heads in log time, and the exported module that chooses by them."""

import numpy as np
import pytest
import torch

from dynamiccl.datasets.costs import NUM_CELLS
from dynamiccl.datasets.features import CONTEXT_COLUMN, FEATURES
from dynamiccl.datasets.history import WINDOW_COLUMN
from dynamiccl.errors import UserError
from dynamiccl.nccl import ABSTAIN, NUM_PROTOCOLS, Algorithm, Config, Protocol
from dynamiccl.train import networks
from dynamiccl.train.policy import PolicyModule, script

BATCH, SHAPE, WIDTH, ACTIONS = 6, (8, 5), CONTEXT_COLUMN["noise_band"] + 5, 4
VALID, NOISE_BAND = WINDOW_COLUMN["valid"], CONTEXT_COLUMN["noise_band"]
#: Shape of what the tests of actions show a head.
HIDDEN = 5
CONFIGS = (
    ABSTAIN,
    Config(Algorithm.Ring, Protocol.LL),
    Config(Algorithm.Tree, None),
    Config(Algorithm.NVLS, Protocol.Simple, 8),
)
RING = (Algorithm.Ring, Protocol.LL)
TREE = (Algorithm.Tree, Protocol.Simple)


def windows(valid: int, seed: int = 0, rows: int = 3) -> torch.Tensor:
    """Windows with so many calls each, right-aligned."""
    made = torch.randn(rows, *SHAPE, generator=torch.Generator().manual_seed(seed))
    made[:, :, VALID] = 1.0
    made[:, : SHAPE[0] - valid] = 0.0
    return made


def trunk_of(name: str = "mlp", seed: int = 0) -> networks.Trunk:
    torch.manual_seed(seed)
    return networks.Trunk(SHAPE, WIDTH, [16], name)


@pytest.mark.parametrize("name", networks.WINDOW_ENCODERS)
def test_every_encoder_scripts_learns_and_looks_at_calls_but_not_at_padding(name: str) -> None:
    trunk, plain, context = trunk_of(name), trunk_of(name), torch.ones(3, WIDTH)
    scripted = torch.jit.script(trunk)
    for valid in (0, 3, 8):
        calls = windows(valid)
        torch.testing.assert_close(scripted(calls, context), plain(calls, context))
    different = trunk(windows(8, seed=1), context) - trunk(windows(8, seed=2), context)
    assert different.abs().min() > 0.0
    mixed = torch.cat([windows(0), windows(4), windows(8)])
    trunk(mixed, torch.ones(9, WIDTH)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in trunk.parameters())
    mean = torch.tensor([0.0, 10.0, -3.0, 0.0, 5.0])
    scale = torch.tensor([1.0, 4.0, 2.0, 1.0, 0.1])
    trunk.window_mean.copy_(mean)
    trunk.window_scale.copy_(scale)
    for valid in (0, 3, 8):
        calls = windows(valid)
        raw = (calls * scale + mean) * calls[:, :, [VALID]]  # padding is zeros as ever
        torch.testing.assert_close(trunk(raw, context), plain(calls, context))


def test_a_state_is_of_the_order_of_calls_and_a_cold_window_has_none() -> None:
    encoder, calls = networks.WINDOW_ENCODERS["lstm"](SHAPE), windows(8)
    state = encoder(torch.cat([windows(0), calls]))
    assert not state[:3].any()
    torch.testing.assert_close(state[3:], encoder(calls))
    assert (encoder(calls) - encoder(calls.flip(1))).abs().max() > 1e-3


class Flat(torch.nn.Module):
    """Somebody's own, which says another width than it has."""

    width = 7

    def __init__(self, _shape: tuple[int, int]) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(32, 7)

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        return window.flatten(1)


class TooNarrow(Flat):
    """A layer takes another number of features than a call has."""

    def forward(self, window: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.layer(window)
        return made.sum(dim=1)


@pytest.mark.parametrize(
    ("own", "said"),
    [
        (Flat, r"'own' makes a tensor \[2, 40\] of 2 windows, and its width is 7: self.width must"),
        (TooNarrow, r"RuntimeError: mat1 and .* given windows \(2, 8, 5\): \(windows, ca"),
    ],
)
def test_bad_encoders_are_told(own: type[Flat], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dynamiccl.train.networks.WINDOW_ENCODERS", dict(networks.WINDOW_ENCODERS))
    networks.register_window_encoder("own", own)
    with pytest.raises(UserError, match=said) as caught:
        trunk_of("own")
    assert "\n" not in str(caught.value)


# --- Actions as inputs ---


def context_of(costs_us: dict[tuple[Algorithm, Protocol], float]) -> torch.Tensor:
    made = torch.zeros(2, len(FEATURES) + NUM_CELLS)
    made[:, CONTEXT_COLUMN["log2_size"]] = 20.0
    for (algorithm, protocol), cost_us in costs_us.items():
        made[:, len(FEATURES) + algorithm * NUM_PROTOCOLS + protocol] = float(np.log(cost_us))
    return made


def features(costs_us: dict[tuple[Algorithm, Protocol], float]) -> dict[str, list[float]]:
    module, context = networks.ActionFeatures(CONFIGS, len(FEATURES)), context_of(costs_us)
    found = module(context)
    assert torch.equal(found, script(module)(context))
    assert found.shape == (2, len(CONFIGS), len(networks.ACTION_FEATURES))
    return {name: found[0, :, i].tolist() for i, name in enumerate(networks.ACTION_FEATURES)}


def test_nccls_choice_is_the_cheapest_cell_and_without_costs_a_config_is_its_name() -> None:
    found = features({TREE: 40.0, (Algorithm.Tree, Protocol.LL): 30.0, RING: 20.0})
    assert found["algorithm 1"] == [1.0, 1.0, 0.0, 0.0]  # NCCL's own choice is Ring, too
    assert found["algorithm 0"] == [0.0, 0.0, 1.0, 0.0]
    assert found["protocol 0"] == [1.0, 1.0, 1.0, 0.0]
    assert found["is NCCL's own choice"] == [1.0, 0.0, 0.0, 0.0]
    assert np.allclose(
        np.exp(found[networks.ACTION_FEATURES[networks.LOG_COST]]), [20.0, 20.0, 30.0, 1.0]
    )
    assert found["cost is known"] == [1.0, 1.0, 1.0, 0.0]  # it does not take NVLS
    assert found["how many cells NCCL takes for cheaper"] == [0.0, 0.0, 1.0, 0.0]
    found = features({})
    wanted = {
        "cost is known": [0.0, 0.0, 0.0, 0.0],
        "algorithm 1": [0.0, 1.0, 0.0, 0.0],
        "algorithm 4": [0.0, 0.0, 0.0, 1.0],
        "protocol 2": [0.0, 0.0, 0.0, 1.0],
        "channels are asked for": [0.0, 0.0, 0.0, 1.0],
        "log2 channels, 0 unless asked for": [0.0, 0.0, 0.0, 3.0],
        "log2 bytes of a channel, 0 unless channels are asked for": [0.0, 0.0, 0.0, 17.0],
    }
    assert {name: found[name] for name in wanted} == wanted


def action_head(*configs: Config) -> networks.ActionHead:
    return networks.ActionHead(
        HIDDEN, networks.ActionInputs((ABSTAIN, *configs), len(FEATURES), uses_cost=True)
    )


def test_before_it_has_learned_a_head_says_what_nccl_says() -> None:
    nvls = Config(Algorithm.NVLS, Protocol.Simple)
    head, hidden = action_head(Config(*RING), Config(*TREE), nvls), torch.randn(2, HIDDEN)
    for layer in (head.out, head.value):
        torch.nn.init.zeros_(layer.weight)
        torch.nn.init.zeros_(layer.bias)
    seen = context_of({RING: 20.0, TREE: 40.0})
    wanted = torch.tensor([[0.0, 0.0, np.log(2.0), 8.0]] * 2).float()  # NCCL does not take the last
    torch.testing.assert_close(head(hidden, seen), wanted)
    for action in range(4):
        column = torch.tensor([[action], [3 - action]])
        torch.testing.assert_close(head.taken(hidden, seen, column), wanted.gather(1, column))
    assert (head(hidden, context_of({})) == 0.0).all()  # nothing is known of costs


# --- The exported module ---


def network(seed: int = 0) -> networks.Network:
    trunk = trunk_of(seed=seed)
    return networks.Network(trunk, networks.OutputHead(16, ACTIONS, dueling=True))


def observation(*, warm: bool = False, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
    context = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    context[:, NOISE_BAND] = noise
    return windows(8 if warm else 0, rows=BATCH), context


ALL = torch.ones(BATCH, ACTIONS)


def gains_of(
    members: list[networks.Network], seen: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(B,) the best actions of the mean, (E, B) gains of them over ABSTAIN, (B, A) mean z."""
    z = torch.stack([member(*seen) for member in members]).detach()
    best = z.mean(dim=0).argmin(dim=1)
    gains = z[:, :, 0] - z.gather(2, best.view(1, -1, 1).expand(len(members), -1, 1))[..., 0]
    return best, gains, z.mean(dim=0)


def test_module_takes_the_best_allowed_action_and_survives_scripting() -> None:
    made = network()
    module = PolicyModule([made], margin=0.0, warm_margin=0.0).eval()
    scripted = torch.jit.script(module)
    action, q = scripted(*observation(), ALL)
    torch.testing.assert_close(q, -torch.exp(made(*observation())))
    assert action.tolist() == module(*observation(), ALL)[0].tolist() == q.argmax(dim=1).tolist()
    mask = (torch.rand(BATCH, ACTIONS, generator=torch.Generator().manual_seed(5)) < 0.5).float()
    mask[:, 0] = 1.0
    action, _ = module(*observation(), mask)
    assert mask.gather(1, action.view(-1, 1)).all()


def test_cold_policy_acts_where_every_member_gains_more_than_margin_and_noise() -> None:
    members = [network(seed) for seed in range(3)]
    best, gains, z = gains_of(members, observation())
    least = gains.min(dim=0).values
    middle = float(least.sort().values[BATCH // 2])
    for margin in (0.0, middle):
        module = PolicyModule(members, margin=margin, warm_margin=0.0)
        action, q = module(*observation(), ALL)
        torch.testing.assert_close(q, -torch.exp(z))
        assert action.tolist() == torch.where(least > margin, best, 0).tolist()
        assert (module(*observation(noise=100.0), ALL)[0] == 0).all()
    assert 0 < (least > 0.0).sum() < BATCH
    assert ((least <= 0.0) & (best != 0)).any()  # they do not agree there


def test_warm_the_members_mean_decides_and_noise_does_not() -> None:
    members = [network(seed) for seed in range(3)]
    _, gains, _ = gains_of(members, observation(warm=True))
    margin = float(gains.mean(dim=0).sort().values[BATCH // 2])
    module = PolicyModule(members, margin=50.0, warm_margin=margin)
    for noise in (0.0, 100.0):
        seen = observation(warm=True, noise=noise)
        best, of_noise, _ = gains_of(members, seen)
        wanted = torch.where(of_noise.mean(dim=0) > margin, best, 0)
        assert module(*seen, ALL)[0].tolist() == wanted.tolist()
    acts = gains.mean(dim=0) > margin
    assert 0 < acts.sum() < BATCH
    assert (gains.min(dim=0).values[acts] <= margin).any()  # not all agree, and yet it acts


def test_an_imitator_gives_masked_actions_nothing_and_is_exported_like_the_rest() -> None:
    imitator, mask = networks.Imitator(trunk_of(), 16, ACTIONS), ALL.clone()
    mask[:, 2] = 0.0
    hidden = imitator.trunk(*observation())
    probabilities = imitator.logits(hidden, observation()[1], mask).softmax(dim=1)
    assert (probabilities[:, 2] == 0.0).all()
    scripted = torch.jit.script(PolicyModule([imitator], margin=-100.0, warm_margin=0.0).eval())
    _, q = scripted(*observation(), mask)
    assert q.argmax(dim=1).tolist() == probabilities.argmax(dim=1).tolist()
    # A head that does not duel has no value in common.
    imitator(*observation())[:, 1].sum().backward()
    gradient = imitator.head.layer.weight.grad
    assert gradient[1].any()
    assert not gradient[[0, 2, 3]].any()
