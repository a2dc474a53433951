from dynamiccl.collect.strategies import make_strategy
from dynamiccl.collect.strategies.adaptive import Adaptive
from dynamiccl.collect.strategies.exhaustive import Exhaustive
from dynamiccl.collect.strategies.random_share import RandomShare
from dynamiccl.collect.strategies.strategy import group_by_task, infeasible_picks, seed_of
from dynamiccl.nccl import ABSTAIN
from tests.collect.strategies.worlds import TEXT, sweep


def test_the_file_says_which_strategy() -> None:
    kinds = {"exhaustive": Exhaustive, "random": RandomShare, "adaptive": Adaptive}
    for kind, wanted in kinds.items():
        made = sweep(f'{TEXT}[strategy]\nkind = "{kind}"')
        assert type(make_strategy(made.file, made.trials)) is wanted


def test_the_file_says_how_much_and_how_long() -> None:
    made = sweep(f'{TEXT}[strategy]\nkind = "random"\nshare = 0.5')
    strategy = make_strategy(made.file, made.trials)
    assert strategy.expected_picks() == 3 * 11 * (2 + 14)
    made = sweep(f'{TEXT}[strategy]\nkind = "adaptive"\n[budget]\nmax_measurements = 70')
    assert make_strategy(made.file, made.trials).expected_picks() == 70


def test_a_task_has_its_default_and_its_feasible_configs() -> None:
    made = sweep(algorithms='["Ring", "PAT"]', num_channels="[0, 99]")
    tasks = group_by_task(made.trials)
    assert [task.size_bytes for task in tasks] == [65536 << n for n in range(11)]
    for task in tasks:
        assert task.default is not None
        assert task.default.config == ABSTAIN
        assert [t.config.key for t in task.candidates] == ["Ring/LL", "Ring/Simple"]
        assert [(p.config, p.repeat, p.probability) for p in task.default_pair()] == [
            (ABSTAIN, 0, None),
            (ABSTAIN, 1, None),
        ]
    # Ring with 99 channels, PAT with any: two protocols each.
    assert len(infeasible_picks(made.trials)) == 11 * 2 * 3


def test_seeds_depend_on_every_word_and_where_it_ends() -> None:
    assert seed_of("a", 1) == seed_of("a", 1)
    assert len({seed_of("a", 1), seed_of("a", 2), seed_of("b", 1), seed_of("a1")}) == 4
