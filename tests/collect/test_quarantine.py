from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from dynamiccl.collect.grid import Interference, LaunchProfile, Setting, Trial
from dynamiccl.collect.runs.quarantine import Quarantine
from dynamiccl.nccl import Algorithm, Collective, Config, Protocol

SETTING = Setting(Collective.AllReduce, 2, 8)
LL = Config(Algorithm.Ring, Protocol.LL)


def trial(size_bytes: int, config: Config = LL, setting: Setting = SETTING) -> Trial:
    return Trial(setting, size_bytes, config)


def test_nothing_is_kept_out_at_first() -> None:
    assert Quarantine().reason(trial(1)) is None


def test_config_is_kept_out_from_the_size_at_which_it_failed_on() -> None:
    quarantine = Quarantine()
    quarantine.add(trial(128), "hung (no new row for 5 s)")
    assert quarantine.reason(trial(127)) is None
    assert quarantine.reason(trial(128)) == (
        "not tried: Ring/LL hung (no new row for 5 s) at 128 bytes"
    )
    assert quarantine.reason(trial(1 << 30)) == quarantine.reason(trial(128))


def test_smallest_failure_counts_with_its_own_reason() -> None:
    quarantine = Quarantine()
    quarantine.add(trial(128), "hung")
    quarantine.add(trial(512), "crashed")
    assert quarantine.reason(trial(512)) == "not tried: Ring/LL hung at 128 bytes"
    quarantine.add(trial(64), "crashed")
    assert quarantine.reason(trial(512)) == "not tried: Ring/LL crashed at 64 bytes"


def test_other_configs_and_settings_stay_in() -> None:
    quarantine = Quarantine()
    quarantine.add(trial(64), "hung")
    for config in (Config(), Config(Algorithm.Ring), replace(LL, num_channels=4)):
        assert quarantine.reason(trial(64, config)) is None
    for setting in (
        replace(SETTING, num_nodes=4),
        replace(SETTING, datatype="half"),
        replace(SETTING, collective=Collective.AllGather),
        replace(SETTING, profile=LaunchProfile("net", (("NCCL_P2P_DISABLE", "1"),))),
        replace(SETTING, interference=Interference("cpu", 0.5)),
    ):
        assert quarantine.reason(trial(64, setting=setting)) is None


def test_why_a_trial_is_infeasible_does_not_matter() -> None:
    quarantine = Quarantine()
    quarantine.add(replace(trial(64), infeasible="for a reason"), "hung")
    assert quarantine.reason(trial(64)) is not None


@given(failures=st.lists(st.integers(1, 40), min_size=1), size=st.integers(1, 40))
def test_order_of_failures_does_not_matter(failures: list[int], size: int) -> None:
    quarantine = Quarantine()
    for failed in failures:
        quarantine.add(trial(failed), "hung")
    assert (quarantine.reason(trial(size)) is not None) == (size >= min(failures))
