"""What can be seen of a rank from outside: its counters, its threads, its children."""

from pathlib import Path

import pytest

from dynamiccl.libraries import PROFILER_NAME
from tests.serve.jobs.conftest import Player, player_of
from tests.serve.jobs.play import at, every
from tests.serve.jobs.setting import JOB, Setting
from tests.serve.jobs.watching import Look, metrics_of

#: All ranks pause before this call, for long enough that their counters are written.
PAUSE_AT, PAUSE_S = 1500, 2.2


def by_name(values: dict[tuple[str, str], float], rank: int) -> dict[str, float]:
    """The counters of the one communicator of a rank."""
    return {name: value for (name, labels), value in values.items() if f'rank="{rank}"' in labels}


def test_counters_say_what_the_job_did(play_job: Player, four_ranks: Setting) -> None:
    metrics, kept = four_ranks.root / "metrics", four_ranks.root / "kept"
    metrics.mkdir()
    chosen = {
        "DYNAMICCL_METRICS_DIR": str(metrics),
        "DYNAMICCL_SAMPLE_PERCENT": "100",
        "DYNAMICCL_PROBE_CALLS": "0",
    }
    played = play_job(
        *at(PAUSE_AT, f"sleep={PAUSE_S}", rank="all"),
        *at(PAUSE_AT + 1, f"sh=cp -r {metrics} {kept}"),
        environment=four_ranks.environment() | chosen,
        ranks=4,
        max_group=1,
        run_ahead=1,
        rate=1000,
        calls=2000,
    )
    assert played.is_sound, played
    files = sorted(kept.glob("*.prom"))
    assert len(files) == 4
    for rank, path in enumerate(files):
        assert path.name.endswith(f"-{rank}.prom")
        values = metrics_of(path.read_text())
        found = by_name(values, rank)
        assert abs(found["dynamiccl_calls"] - PAUSE_AT) <= 3
        assert found["dynamiccl_table"] >= 1
        assert found["dynamiccl_ended"] == found["dynamiccl_off"] == 0
        assert found["dynamiccl_waiting"] == found["dynamiccl_uncountable"] == 0
        assert found["dynamiccl_withdrawn"] == 0
        assert found["dynamiccl_proposals_agreed"] == (rank == 0)  # only a leader knows
        if rank == 0:
            assert 0 < found["dynamiccl_timed_calls"] <= PAUSE_AT + 3
        assert abs(values["dynamiccl_records", ""] - PAUSE_AT) <= 40
        assert values["dynamiccl_records_dropped", ""] == 0
        assert values["dynamiccl_times_lost", ""] == 0


def test_counters_of_many_communicators_are_whole_lines(
    play_job: Player, four_ranks: Setting
) -> None:
    metrics = four_ranks.root / "metrics"
    metrics.mkdir()
    played = play_job(
        environment=four_ranks.environment() | {"DYNAMICCL_METRICS_DIR": str(metrics)},
        ranks=4,
        comms=100,
        threads=4,
        lifetime=20,
        rate=50,
        calls=100,
    )
    assert played.is_sound, played
    # A rank that exits while it writes leaves a file beside them that no collector reads.
    files = list(metrics.glob("*.prom"))
    assert len(files) == 4
    for path in files:
        told: dict[str, set[str]] = {}
        for name, labels in metrics_of(path.read_text()):
            told.setdefault(labels, set()).add(name)
        of_process = told.pop("")
        assert of_process >= {"dynamiccl_records", "dynamiccl_records_dropped"}
        # However many there are, each is told with everything.
        assert len(set(map(frozenset, told.values()))) <= 1


@pytest.mark.parametrize("folder", ["missing", "file"])
def test_counters_that_cannot_be_written_disturb_nothing(
    folder: str, play_job: Player, four_ranks: Setting
) -> None:
    (four_ranks.root / "file").write_text("")
    chosen = {"DYNAMICCL_METRICS_DIR": str(four_ranks.root / folder)}
    played = play_job(environment=four_ranks.environment() | chosen, ranks=4, **JOB)
    assert played.is_sound, played
    assert played.acted > 0


def test_the_recorder_alone_agrees_on_nothing(job_build_dir: Path, four_ranks: Setting) -> None:
    """Mode observe: a profiler, and no tuner."""
    look = Look(four_ranks.root / "look")
    calls_dir = four_ranks.root / "calls"
    calls_dir.mkdir(mode=0o700)
    played = player_of(job_build_dir, PROFILER_NAME)(
        *at(400, look.action),
        environment=four_ranks.environment() | {"DYNAMICCL_CALLS_DIR": str(calls_dir)},
        ranks=4,
        rate=1000,
        calls=500,
    )
    assert played.is_sound, played
    assert played.acted == 0
    assert len(list(calls_dir.iterdir())) == 4
    assert len(look.ranks()) == 4
    for rank in look.ranks():
        assert [name for name in rank.threads if name.startswith("dynamiccl")] == [
            "dynamiccl-calls"
        ]


def test_children_touch_nothing_of_their_parents(play_job: Player, four_ranks: Setting) -> None:
    """Neither its files nor its sockets, with whatever communicators there are meanwhile."""
    folders = {name: four_ranks.root / name for name in ("metrics", "calls")}
    for folder in folders.values():
        folder.mkdir()
    listed = four_ranks.root / "sockets"
    played = play_job(
        *every(300, "fork", rank="all"),
        *at(1501, f"sh=sleep 0.1; find {four_ranks.run_dir} -type s > {listed}"),
        environment=four_ranks.environment()
        | {
            "DYNAMICCL_METRICS_DIR": str(folders["metrics"]),
            "DYNAMICCL_CALLS_DIR": str(folders["calls"]),
            "DYNAMICCL_SAMPLE_PERCENT": "100",
        },
        ranks=4,
        comms=2,
        **JOB,
    )
    assert played.is_sound, played
    assert played.acted > 0
    assert len(list(folders["metrics"].iterdir())) == 4
    assert len(files_below(folders["calls"])) == 4
    assert len(listed.read_text().splitlines()) >= 6  # one for each rank of each communicator


def files_below(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file()]
