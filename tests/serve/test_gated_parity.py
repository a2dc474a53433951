"""A gated policy in TorchScript, in integer tables and in the plugin: one answer in every bin."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dynamiccl.datasets.features import TUNED, Observations
from dynamiccl.datasets.manifest import Manifest
from dynamiccl.datasets.questions import cold_questions, decide, table_supports
from dynamiccl.evaluate.gate import pass_gate, write_gated
from dynamiccl.nccl import ABSTAIN, Collective, Config
from dynamiccl.serve.artifact import pick_table
from dynamiccl.serve.export import export_artifact
from dynamiccl.serve.table import DecisionTable
from dynamiccl.sizes import bin_center_bytes, bin_first_byte, size_bin
from dynamiccl.train.policy import TorchPolicy
from tests.policies import hand_made_manifest
from tests.rows import default, forced, frame
from tests.serve.abi import TunerPlugin, loopback_environment
from tests.serve.answers import expected_answer
from tests.serve.tables import made_up_costs

VERSIONS = (4, 5, 6)
SHAPES = ((4, 8), (1, 8))


class Restless(torch.nn.Module):
    """Wants another config at every size."""

    def forward(
        self, window: torch.Tensor, context: torch.Tensor, mask: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        each = torch.arange(1, mask.shape[1] + 1) + 0.0 * window.sum()
        scores = torch.sin(500.0 * context.sum(dim=1, keepdim=True) * each)
        scores = scores.masked_fill(mask < 0.5, -2.0)
        return scores.argmax(dim=1), scores


@pytest.fixture(scope="module")
def restless_gated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A policy that wants AUTO knobs and channel counts, too, through a gate."""
    folder = tmp_path_factory.mktemp("restless")
    manifest = hand_made_manifest(
        frame(*_rows("trained", 1)), frame().select("system", "collective", noise_band="time_us")
    )
    policy = Restless()
    (folder / "policy").mkdir()
    torch.jit.script(policy).save(str(folder / "policy" / "policy.pt"))  # type: ignore[no-untyped-call]
    manifest.write(folder / "policy")
    gated = pass_gate(TorchPolicy.load(folder / "policy"), frame(*_rows("fresh", 6)))
    write_gated(gated, folder / "policy", folder / "gated")
    return folder / "gated"


def _rows(sweep: str, count: int) -> list[dict[str, Any]]:
    """Runs of two shapes in which every config gains at one size and loses at the next."""
    random = np.random.default_rng(1)
    rows = []
    knobs = [("Ring", "LL", None), ("Tree", None, None), (None, "LL", 4), ("Ring", "Simple", 7)]
    for run in range(count):
        for (nodes, ranks), collective in ((s, c) for s in SHAPES for c in TUNED):
            for index in range(size_bin(1 << 16), size_bin(1 << 24)):
                where: dict[str, Any] = {
                    "num_nodes": nodes, "ranks_per_node": ranks, "num_ranks": nodes * ranks,
                    "collective": collective.wire, "size_bytes": bin_center_bytes(index),
                    "sweep": sweep, "run": f"{sweep}-{run}", "repeat": run,
                    "actual_num_channels": 8,
                }  # fmt: skip
                noise = random.lognormal(0.0, 0.005, 1 + len(knobs))
                rows.append(default(100.0 * noise[0], **where))
                for n, (algorithm, protocol, channels) in enumerate(knobs):
                    if algorithm == "Tree" and collective is not Collective.AllReduce:
                        continue  # NCCL has none
                    time_us = (80.0 if (index // 3 + n) % 2 else 120.0) * noise[1 + n]
                    rows.append(forced(algorithm, protocol, time_us, channels=channels, **where))
    return rows


def test_policy_table_and_plugin_agree_in_every_bin(
    restless_gated: Path, plugin_path: Path, tmp_path: Path
) -> None:
    gated = restless_gated
    artifact = export_artifact(gated, tmp_path / "artifact")
    plugin = TunerPlugin(plugin_path)
    manifest = Manifest.read(gated)
    supports = table_supports(manifest)
    seen: Counter[tuple[str, bool]] = Counter()
    for support in supports:
        wanted = _asked_cold(gated, manifest, support)
        key = (support.num_nodes, support.num_ranks)
        table = DecisionTable.read(
            artifact.directory / pick_table(artifact, *key, support.system).path
        )
        environment = loopback_environment(artifact.directory, support.system)
        assert (table.first_bin, table.num_bins) == (
            min(b for _, b in wanted),
            len(wanted) // len(TUNED),
        )
        all_costs = {c: made_up_costs(c, support.num_nodes) for c in TUNED}
        for version in VERSIONS:
            with plugin.communicator(
                support.num_ranks,
                support.num_nodes,
                version=version,
                environment=environment,
                all_ranks=True,
            ) as communicator:
                for (collective, index), config in wanted.items():
                    assert table.at(collective, index) == config
                    costs = all_costs[collective]
                    expected = expected_answer(config, costs, num_nodes=support.num_nodes)
                    # Its lowest and its highest size are of the bin, and so is all between.
                    last = bin_first_byte(index + 1) - 1
                    for size in (bin_first_byte(index), bin_center_bytes(index), last):
                        answer = communicator.ask(collective, size, costs)
                        where = (support.num_ranks, version, collective, size)
                        assert answer.acted == expected.acted == (config is not None), where
                        assert answer.config == expected.config, where
                        np.testing.assert_array_equal(
                            answer.cost_table_after, expected.cost_table_after, str(where)
                        )
                        seen[collective.wire, answer.acted] += 1
                    for beyond in (bin_first_byte(table.first_bin) - 1, _end(table)):
                        assert not communicator.ask(collective, beyond, costs).acted
    acted = sum(count for (_, acts), count in seen.items() if acts)
    assert acted >= 3 * len(VERSIONS) * 5
    assert seen.total() - acted >= 3 * len(VERSIONS) * 10
    assert len(supports) >= 2
    # AUTO knobs and channels pass the gate, too.
    configs = manifest.actions().configs
    gated_bins = [actions for s in manifest.supports for actions in (s.gated or {}).values()]
    passed = {configs[int(action)] for actions in gated_bins for action in actions}
    assert any(None in {config.algorithm, config.protocol} for config in passed)
    assert any(config.num_channels for config in passed)


def _asked_cold(
    gated: Path, manifest: Manifest, support: Any
) -> dict[tuple[Collective, int], Config | None]:
    """What the gated policy says in TorchScript, one bin at a time, as a cold job would ask it."""
    policy = TorchPolicy.load(gated)
    configs = manifest.actions().configs
    asked = cold_questions(manifest, support)
    wanted = {}
    for row in range(len(asked.context)):
        actions = decide(
            policy, Observations.cold(asked.context[row : row + 1]), asked.mask[row : row + 1]
        )
        config = configs[int(actions[0])]
        key = (TUNED[row // asked.num_bins], asked.first_bin + row % asked.num_bins)
        wanted[key] = None if config == ABSTAIN else config
    return wanted


def _end(table: DecisionTable) -> int:
    return bin_first_byte(table.first_bin + table.num_bins)
