"""The retry round (`--retry-failed`): failed picks once more, with NCCL's default beside them.

Failed rows stay in the data; the rows of the retry round are added. After it the old failures no
longer count: not for the quarantine, the strategy, or the final choices.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from dynamiccl.collect.outcomes import Outcome

#: A pick as the journal has it: key of the trial, repeat, probability of a draw.
Entry = list[Any]


def retry_record(number: int, history: Iterable[Outcome]) -> dict[str, Any] | None:
    """The journal's record of retry round `number`; None when nothing failed."""
    failed = Counter(outcome.trial_key for outcome in history if _failed(outcome))
    if not failed:
        return None
    picks: list[Entry] = [
        [key, repeat, None] for key, count in failed.items() for repeat in range(count)
    ]
    return {"round": number, "picks": picks, "retry": True}


def last_retry(rounds: Sequence[Mapping[str, Any]]) -> int:
    """Number of the last retry round; -1 = none."""
    return max((number for number, record in enumerate(rounds) if "retry" in record), default=-1)


def that_count(outcomes: Iterable[Outcome], rounds: Sequence[Mapping[str, Any]]) -> list[Outcome]:
    """Outcomes without failures that a later round retried."""
    tried_in = {
        entry[0]: number
        for number, record in enumerate(rounds)
        if "retry" in record
        for entry in record["picks"]
    }
    return [
        outcome
        for outcome in outcomes
        if not (_failed(outcome) and outcome.round < tried_in.get(outcome.trial_key, -1))
    ]


def without_retries(
    number: int, history: Iterable[Outcome], rounds: Sequence[Mapping[str, Any]]
) -> tuple[int, list[Outcome]]:
    """Round number and history as a strategy counts them, without retry rounds.

    Outcomes of a retry round count to the round before it.
    """
    added = [at for at, record in enumerate(rounds) if "retry" in record]
    own = [
        replace(outcome, round=outcome.round - sum(at <= outcome.round for at in added))
        for outcome in history
    ]
    return number - sum(at < number for at in added), own


def _failed(outcome: Outcome) -> bool:
    return not outcome.ok and not outcome.infeasible
