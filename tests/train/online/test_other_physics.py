"""A policy that fits only the simulator that it learned of, and the gate that keeps it out."""

from pathlib import Path

import pytest

from dynamiccl.collect.simulated import simulate
from dynamiccl.datasets.store import read
from dynamiccl.evaluate.evidence import Verdict
from dynamiccl.evaluate.gate import Gated, pass_gate
from dynamiccl.simulator import systems
from dynamiccl.train.fit import fit
from dynamiccl.train.policy import TorchPolicy
from dynamiccl.train.recipe import make_recipe
from tests.stores import new_store
from tests.train.online.conftest import SWEEP

OFFLINE = ("steps=400", "steps_per_epoch=200", "hidden_sizes=32", "num_members=1")


@pytest.fixture(scope="module")
def wrong(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A system file whose hops of Tree/Simple are a hundred times too fast."""
    shipped = Path(systems.__file__).with_name("systems") / "b300-nvlink.toml"
    text = shipped.read_text(encoding="utf-8")
    assert text.count("value = 28.108") == 1
    path = tmp_path_factory.mktemp("wrong") / "wrong.toml"
    path.write_text(text.replace("value = 28.108", "value = 0.2"), encoding="utf-8")
    return path


def _fresh(policy: TorchPolicy, system: str, folder: Path) -> Gated:
    text = SWEEP.replace('[simulator]\nsystem = "b300-nvlink"\nseed = 0', "[simulator]")
    text = text.replace('"quiet"', '"fresh"').replace("cycles = 2", "cycles = 8")
    simulate(f'{text}system = "{system}"\nseed = 7\n', folder)
    return pass_gate(policy, read(folder))


def test_what_only_its_simulator_rewards_does_not_pass(wrong: Path, tmp_path: Path) -> None:
    data = tmp_path / "data"
    simulate(SWEEP.replace('system = "b300-nvlink"\nseed', f'system = "{wrong}"\nseed'), data)
    uri = new_store(tmp_path)
    offline = make_recipe("ddqn-dueling", OFFLINE)
    done = fit(data, offline, experiment="x", tracking_uri=uri, seed=0)
    policy = TorchPolicy.load(Path(done.run_directory) / "policy")

    in_simulator = _fresh(policy, str(wrong), tmp_path / "as-trained").to_json()["counts"]
    in_reality = _fresh(policy, "b300-nvlink", tmp_path / "real")
    assert in_simulator[Verdict.PASSED] > 5
    wanted = [cell for cell in in_reality.cells if cell.verdict is not Verdict.ABSTAINS]
    assert {cell.config for cell in wanted} == {"Tree/Simple"}
    assert {cell.verdict for cell in wanted} == {Verdict.REFUSED}
