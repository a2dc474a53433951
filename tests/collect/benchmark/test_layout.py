from collections import Counter

from dynamiccl.collect.benchmark.layout import lay_out
from dynamiccl.collect.runner import Launch, LaunchMode, Pick
from tests.collect.benchmark.sweeps import round_of, sweep


def lay(*, plays: bool, read_back: bool = False, **keys: str) -> tuple[Launch, ...]:
    return lay_out(
        round_of(sweep(**keys)), plays_schedules=plays, must_read_back=lambda _: read_back
    )


def modes(launches: tuple[Launch, ...]) -> dict[str, int]:
    return dict(Counter(launch.mode.value for launch in launches))


def test_one_process_measures_the_grid_and_one_the_untouched_default() -> None:
    launches = lay(plays=True)
    assert modes(launches) == {"sweep": 1, "reference": 1}
    [played] = [launch for launch in launches if launch.mode is LaunchMode.SWEEP]
    assert played.is_scheduled
    # 3 sizes x (default twice + 2 algorithms x 2 protocols x 2 channel counts)
    assert len(played.picks) == 3 * (2 + 8)
    [reference] = [launch for launch in launches if launch.mode is LaunchMode.REFERENCE]
    assert not reference.is_scheduled
    assert {pick.trial.config.key for pick in reference.picks} == {"ABSTAIN"}
    assert Counter(p.trial.size_bytes for p in reference.picks) == {1 << k: 2 for k in (20, 21, 22)}


def test_without_a_plugin_each_config_has_its_process_and_the_default_is_the_reference() -> None:
    launches = lay(plays=False)
    assert modes(launches) == {"forced": 1 + 8}
    for launch in launches:
        assert len({pick.trial.config for pick in launch.picks}) == 1


def test_read_back_comes_once_for_what_is_unknown() -> None:
    assert modes(lay(plays=True, read_back=True)) == {"sweep": 1, "reference": 1, "read-back": 1}
    assert modes(lay(plays=False, read_back=True)) == {"forced": 9, "read-back": 9}
    [back] = [x for x in lay(plays=True, read_back=True) if x.mode is LaunchMode.READ_BACK]
    assert Counter(pick.repeat for pick in back.picks) == {0: 3 * 9}


def test_profile_has_its_own_process_and_the_reference_stays_untouched() -> None:
    launches = lay(plays=True, profiles='[{ name = "net", transport = "NET" }]')
    assert modes(launches) == {"sweep": 1, "reference": 1}
    for launch in launches:
        untouched = launch.mode is LaunchMode.REFERENCE
        assert launch.setting.profile.name == ("default" if untouched else "net")
    forced = lay(plays=False, profiles='[{ name = "net", transport = "NET" }]')
    assert modes(forced) == {"forced": 9, "reference": 1}


def test_profiles_share_one_reference() -> None:
    profiles = '[{ name = "default" }, { name = "net", transport = "NET" }]'
    assert modes(lay(plays=True, profiles=profiles)) == {"sweep": 2, "reference": 1}
    assert modes(lay(plays=False, profiles=profiles)) == {"forced": 18}


def test_sizes_that_no_walk_joins_need_more_processes() -> None:
    launches = lay(plays=True, sizes='{ min = "1M", max = "4M", steps_per_octave = 4 }')
    assert modes(launches) == {"sweep": 4, "reference": 4}


def test_collective_that_nobody_tunes_is_run_as_it_is() -> None:
    launches = lay(plays=True, collectives='["AlltoAll"]', algorithms="[]")
    assert modes(launches) == {"forced": 1}
    assert not launches[0].is_scheduled


def test_every_pick_is_in_one_timed_launch_and_ids_are_unique() -> None:
    made = sweep(collectives='["AllReduce", "AllGather"]', datatypes='["float", "half"]')
    round_ = round_of(made)
    for plays in (True, False):
        launches = lay_out(round_, plays_schedules=plays, must_read_back=lambda _: True)
        assert len({launch.id for launch in launches}) == len(launches)
        timed = [x for x in launches if x.mode in {LaunchMode.SWEEP, LaunchMode.FORCED}]
        found: Counter[Pick] = Counter(pick for launch in timed for pick in launch.picks)
        assert found == Counter(round_.picks)
        assert launches == lay_out(round_, plays_schedules=plays, must_read_back=lambda _: True)
