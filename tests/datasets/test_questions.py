from typing import Any

import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.questions import allowed
from dynamiccl.nccl import Collective
from dynamiccl.sizes import size_bin
from tests.policies import hand_made_manifest
from tests.rows import MIB, default, forced, frame

NOISE = pl.DataFrame({"system": ["box"], "collective": ["AllReduce"], "noise_band": [0.01]})


def names_allowed(*rows: dict[str, Any]) -> set[str]:
    """The configs that a table of the rows' only group may hold at one mebibyte."""
    manifest = hand_made_manifest(frame(*rows), NOISE)
    (support,) = manifest.supports
    mask = allowed(manifest, support, Collective.AllReduce, [size_bin(MIB)])
    configs = Catalogue.from_json(manifest.catalogue).configs
    return {config.key for config, may in zip(configs, mask[0], strict=True) if may}


def test_a_table_asks_for_no_more_channels_than_nccl_was_seen_to_use() -> None:
    seen = names_allowed(
        default(actual_num_channels=16),
        forced("Ring", "Simple", channels=8, actual_num_channels=8),
        forced("Ring", "Simple", channels=24, actual_num_channels=24),
        forced("Ring", "Simple", channels=64, actual_num_channels=24),
    )
    assert {name.split("/")[-1] for name in seen} == {"8ch", "24ch", "ABSTAIN"}


def test_without_a_read_back_no_number_of_channels_is_known_to_be_there() -> None:
    seen = names_allowed(default(), forced("Ring", "Simple"), forced("Ring", "Simple", channels=8))
    assert len(seen) == 2
    assert not any("8" in name for name in seen)
