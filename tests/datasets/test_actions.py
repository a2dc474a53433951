import json
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.store import config_of
from dynamiccl.nccl import ABSTAIN, Algorithm, Config, Protocol
from tests.rows import default, forced, frame

CONFIGS = st.builds(
    Config,
    st.sampled_from([None, *Algorithm]),
    st.sampled_from([None, *Protocol]),
    st.sampled_from([None, 1, 8]),
    st.sampled_from([None, 4096]),
)


def test_auto_is_never_merged_with_what_it_resolved_to_and_the_default_is_action_0() -> None:
    rows = frame(
        forced("Ring", None, actual_algorithm="Ring", actual_protocol="LL128"),
        forced("Ring", "LL128"),
        forced(None, "LL128"),
        forced("Ring", "LL128", channels=8),
        default(actual_algorithm="Ring", actual_protocol="LL128"),
        forced(None),  # a policy of the source's chose: neither NCCL's default nor a config
    )
    catalogue = Catalogue.from_frame(rows)
    assert catalogue.configs[0] == ABSTAIN
    assert sorted(config.key for config in catalogue.configs) == sorted(
        ["ABSTAIN", "Ring/auto", "Ring/LL128", "auto/LL128", "Ring/LL128/8ch"]
    )
    *asked, own, unknown = catalogue.actions(rows).to_list()
    assert sorted(asked) == [1, 2, 3, 4]
    assert (own, unknown) == (ABSTAIN_ACTION, None)


@given(configs=st.sets(CONFIGS, max_size=12), shuffle=st.randoms(use_true_random=False))
@settings(deadline=None, max_examples=50)
def test_every_config_has_its_own_action_in_any_order_of_rows(
    configs: set[Config], shuffle: Random
) -> None:
    rows = [
        forced(
            None if config.algorithm is None else config.algorithm.wire,
            None if config.protocol is None else config.protocol.wire,
            channels=config.num_channels,
            requested_chunk_bytes=config.chunk_bytes,
        )
        for config in sorted(configs - {ABSTAIN}, key=lambda config: config.key)
    ]
    shuffle.shuffle(rows)
    made = frame(default(), *rows)
    catalogue = Catalogue.from_frame(made)
    assert set(catalogue.configs) == {ABSTAIN, *configs}
    assert Catalogue.from_frame(made.reverse()) == catalogue
    told = json.loads(json.dumps(catalogue.to_json()))
    assert tuple(map(config_of, told)) == catalogue.configs
    placed = dict(zip(catalogue.actions(made), made.iter_rows(named=True), strict=True))
    assert sorted(placed) == list(range(len(catalogue)))
    assert all(config_of(placed[i]) == catalogue.configs[i] for i in placed)
