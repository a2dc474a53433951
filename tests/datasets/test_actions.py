import json

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.store import config_of
from dynamiccl.errors import DataError
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.rows import default, forced, frame

CONFIGS = st.builds(
    Config,
    st.sampled_from([None, *Algorithm]),
    st.sampled_from([None, *Protocol]),
    st.sampled_from([None, 1, 8]),
    st.sampled_from([None, 4096]),
)
CATALOGUES = st.sets(CONFIGS, max_size=12).map(
    lambda found: Catalogue((ABSTAIN, *sorted(found - {ABSTAIN}, key=lambda c: c.key)))
)


def row_of(config: Config) -> dict[str, object]:
    algorithm, protocol = config.algorithm, config.protocol
    return forced(
        algorithm.wire if algorithm is not None else None,
        protocol.wire if protocol is not None else None,
        channels=config.num_channels,
        requested_chunk_bytes=config.chunk_bytes,
    )


def test_auto_is_never_merged_with_what_it_resolved_to() -> None:
    rows = frame(
        forced("Ring", None, actual_algorithm="Ring", actual_protocol="LL128"),
        forced("Ring", "LL128"),
        forced(None, "LL128"),
        forced("Ring", "LL128", channels=8),
    )
    catalogue = Catalogue.from_frame(rows)
    assert sorted(config.key for config in catalogue.configs) == sorted(
        ["ABSTAIN", "Ring/auto", "Ring/LL128", "auto/LL128", "Ring/LL128/8ch"]
    )
    assert catalogue.actions(rows).n_unique() == 4


def test_default_is_action_0_whatever_ran() -> None:
    rows = frame(default(actual_algorithm="Tree", actual_protocol="LL"), forced("Tree", "LL"))
    catalogue = Catalogue.from_frame(rows)
    assert catalogue.configs == (ABSTAIN, Config(Algorithm.Tree, Protocol.LL))
    assert catalogue.index(ABSTAIN) == ABSTAIN_ACTION == 0
    assert catalogue.actions(rows).to_list() == [0, 1]


def test_request_that_is_not_known_is_no_action() -> None:
    """A policy of the source's chose: neither NCCL's default nor a config."""
    rows = frame(forced(None), default(), forced("Ring"))
    assert Catalogue.from_frame(rows).actions(rows).to_list() == [None, 0, 1]


def test_config_outside_the_catalogue_has_no_action() -> None:
    catalogue = Catalogue.from_frame(frame(forced("Ring")))
    assert catalogue.actions(frame(forced("Tree"))).to_list() == [None]
    with pytest.raises(KeyError, match="Tree/LL"):
        catalogue.index(Config(Algorithm.Tree, Protocol.LL))


@given(catalogue=CATALOGUES)
@settings(deadline=None, max_examples=50)
def test_json_round_trip(catalogue: Catalogue) -> None:
    assert Catalogue.from_json(json.loads(json.dumps(catalogue.to_json()))) == catalogue


@given(catalogue=CATALOGUES, seed=st.randoms())
@settings(deadline=None, max_examples=50)
def test_every_config_has_its_own_action_in_any_order_of_rows(
    catalogue: Catalogue,
    seed: st.randoms,  # type: ignore[valid-type]
) -> None:
    rows = [row_of(config) for config in catalogue.configs[1:]]
    seed.shuffle(rows)  # type: ignore[attr-defined]
    made = frame(default(), *rows)
    again = Catalogue.from_frame(made)
    assert set(again.configs) == set(catalogue.configs)
    assert Catalogue.from_frame(made.reverse()) == again
    placed = dict(zip(again.actions(made), made.iter_rows(named=True), strict=True))
    assert sorted(placed) == list(range(len(again)))
    assert all(config_of(placed[i]) == again.configs[i] for i in placed)


@pytest.mark.parametrize(
    "configs",
    [
        (),
        (Config(Algorithm.Ring),),
        (ABSTAIN, ABSTAIN),
        (ABSTAIN,) + (Config(None, Protocol.LL),) * 2,
    ],
)
def test_catalogue_begins_with_abstain_and_repeats_nothing(configs: tuple[Config, ...]) -> None:
    with pytest.raises(DataError, match="a catalogue must"):
        Catalogue(configs)


def test_actions_of_no_rows_are_integers() -> None:
    empty = Catalogue.from_frame(frame(default())).actions(frame())
    assert (empty.len(), empty.dtype) == (0, pl.Int64())
