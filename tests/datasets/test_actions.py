import json

from dynamiccl.datasets.actions import ABSTAIN_ACTION, Catalogue
from dynamiccl.datasets.store import config_of
from dynamiccl.nccl import ABSTAIN
from tests.rows import default, forced, frame


def test_auto_is_never_merged_with_what_it_resolved_to_and_the_default_is_action_0() -> None:
    rows = frame(
        forced("Ring", None, actual_algorithm="Ring", actual_protocol="LL128"),
        forced("Ring", "LL128"),
        forced(None, "LL128"),
        forced("Ring", "LL128", channels=8, requested_chunk_bytes=4096),
        default(actual_algorithm="Ring", actual_protocol="LL128"),
        forced(None),  # a policy of the source's chose: neither NCCL's default nor a config
    )
    catalogue = Catalogue.from_frame(rows)
    assert catalogue.configs[0] == ABSTAIN
    rest = ["auto/LL128", "Ring/auto", "Ring/LL128", "Ring/LL128/8ch/4096B"]
    assert [config.key for config in catalogue.configs[1:]] == rest
    assert Catalogue.from_frame(rows.reverse()) == catalogue
    told = json.loads(json.dumps(catalogue.to_json()))
    assert tuple(map(config_of, told)) == catalogue.configs
    *asked, own, unknown = catalogue.actions(rows).to_list()
    assert sorted(asked) == [1, 2, 3, 4]
    assert (own, unknown) == (ABSTAIN_ACTION, None)
