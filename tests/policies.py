"""A manifest of a hand-made policy, for tests without training."""

import polars as pl

from dynamiccl.datasets.actions import Catalogue
from dynamiccl.datasets.cells import run_names
from dynamiccl.datasets.features import feature_table, window_table
from dynamiccl.datasets.manifest import Manifest, find_supports


def hand_made_manifest(rows: pl.DataFrame, noise: pl.DataFrame) -> Manifest:
    """What training would write for measurement `rows`, noise bands by NOISE_KEY in `noise`."""
    catalogue = Catalogue.from_frame(rows)
    return Manifest(
        recipe="hand-made",
        catalogue=catalogue.to_json(),
        features=feature_table(["default"]),
        window_features=window_table(),
        window_length=8,
        launch_profiles=["default"],
        supports=find_supports(rows, catalogue, noise),
        abstain_margin=0.02,
        data_hash="0",
        git_commit="unknown",
        dynamiccl_version="0.1.0",
        created="2026-01-01",
        knows_shapes=False,
        runs=run_names(rows),
    )
