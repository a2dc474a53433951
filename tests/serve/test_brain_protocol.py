"""Messages to and from a brain process: what is written is read, and nothing else is accepted."""

import contextlib
import re
import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dynamiccl.datasets.features import TUNED
from dynamiccl.datasets.history import WINDOW_LENGTH, Call
from dynamiccl.nccl import Algorithm, Protocol
from dynamiccl.serve import brain_server as protocol
from dynamiccl.serve.brain_server import (
    LENGTH,
    Answer,
    MessageError,
    Question,
    decode_question,
    encode_answer,
)
from dynamiccl.serve.build import SOURCE_DIR
from dynamiccl.serve.table import MAX_BINS, DecisionTable
from dynamiccl.serve.torchscript import BrainConfig, History, KeyCalls
from tests.serve.leader import decode_answer, encode_question
from tests.serve.tables import random_table


def told_task(task: KeyCalls, more: int) -> KeyCalls:
    """The task with a number of calls that its window can be the end of."""
    count = len(task.calls) + (more if len(task.calls) == WINDOW_LENGTH else 0)
    return replace(task, num_timed=count % 256 if task.calls else None)


def drawn_table(seed: int, num_bins: int = 5) -> DecisionTable:
    return random_table(np.random.default_rng(seed), first_bin=0, num_bins=num_bins)


POSITIVE = st.floats(min_value=0.0, max_value=1e12, exclude_min=True)
KNOWN = st.floats(min_value=0.0, max_value=1e12)
CALLS = st.builds(
    Call,
    size_bytes=st.integers(1, (1 << 62) - 1),
    time_us=POSITIVE,
    algorithm=st.none() | st.sampled_from(Algorithm),
    protocol=st.none() | st.sampled_from(Protocol),
    num_channels=st.none() | st.integers(1, 64),
    interference=st.none() | KNOWN,
    skew_us=st.none() | KNOWN,
)
TASKS = st.builds(
    KeyCalls,
    st.sampled_from(TUNED),
    st.integers(0, MAX_BINS - 1),
    st.lists(CALLS, max_size=8).map(tuple),
)
TOLD_TASKS = TASKS | st.builds(told_task, TASKS, st.integers(0, 1000))
TABLES = st.integers(0, 2**16).map(drawn_table)
QUESTIONS = st.builds(
    Question,
    st.integers(0, 2**64 - 1),
    st.builds(
        BrainConfig,
        st.text(max_size=100),
        st.text(max_size=40),
        st.integers(1, 2**20),
        st.integers(1, 2**30),
    ),
    st.builds(History, st.lists(TOLD_TASKS, max_size=4).map(tuple), st.none() | TABLES),
)
ANSWERS = st.integers(0, 2**64 - 1).flatmap(
    lambda number: (
        st.just(Answer(number))
        | TABLES.map(lambda table: Answer(number, table=table))
        | st.text(max_size=50).map(lambda text: Answer(number, error=text))
    )
)
CALL = Call(1 << 20, 50.0, Algorithm.Ring, Protocol.LL, 8)
QUESTION = Question(
    7, BrainConfig("/a", "box", 1, 8), History((KeyCalls(TUNED[4], 80, (CALL, CALL)),), None)
)


def body(message: bytes) -> bytes:
    assert LENGTH.unpack(message[:4])[0] == len(message) - 4
    return message[4:]


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(QUESTIONS)
def test_question_is_read_as_it_was_written(question: Question) -> None:
    assert decode_question(body(encode_question(question))) == question


@given(ANSWERS)
def test_answer_is_read_as_it_was_written(answer: Answer) -> None:
    assert decode_answer(body(encode_answer(answer))) == answer


@given(st.binary(max_size=400))
def test_random_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(MessageError):
        decode_question(data)
    with pytest.raises(MessageError):
        decode_answer(data)


@settings(max_examples=50, suppress_health_check=[HealthCheck.too_slow])
@given(QUESTIONS, st.data())
def test_damaged_question_is_refused_or_another_question(
    question: Question, data: st.DataObject
) -> None:
    message = bytearray(body(encode_question(question)))
    at = data.draw(st.integers(0, len(message) - 1))
    message[at] ^= data.draw(st.integers(1, 255))
    with contextlib.suppress(MessageError):
        assert isinstance(decode_question(bytes(message)), Question)
    cut = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(MessageError):
        decode_question(body(encode_question(question))[:cut])


#: Offset in the bytes of QUESTION, layout, a number that no leader sends there, why not.
SPOILED: list[Any] = [
    (8, "<I", 2, "not a message of version 1"),
    (12, "<I", 2, "kind 2"),
    (32, "<I", 5000, "5000 bytes where 4096"),
    (45, "<I", 1 << 20, "bytes where 10012"),
    (49, "<I", 5000, "5000 tasks"),
    (53, "<i", 5, "is in no table"),
    (53, "<i", 99, "99 is not a valid Collective"),
    (53, "<i", -1, "-1 is not a valid Collective"),
    (57, "<i", 249, "in no table"),
    (57, "<i", -1, "in no table"),
    (61, "<i", 9, "9 calls"),
    (65, "<Q", 0, "0 bytes in"),
    (65, "<Q", 1 << 62, "bytes in"),
    (73, "<d", 0.0, "in 0.0 us"),
    (73, "<d", float("nan"), "in nan us"),
    (81, "<d", float("inf"), "bytes in"),
    (97, "<b", 7, "7 is not a valid Algorithm"),
    (98, "<b", -2, "-2 is not a valid Protocol"),
    (99, "<b", 65, "65 channels"),
]


def spoiled(offset: int, layout: str, value: float) -> bytes:
    message = bytearray(body(encode_question(QUESTION)))
    struct.pack_into(layout, message, offset, value)
    return bytes(message)


def test_every_number_of_a_question_is_checked() -> None:
    for *place, why in SPOILED:
        with pytest.raises(MessageError, match=re.escape(why)):
            decode_question(spoiled(*place))


def test_trailing_bytes_and_foreign_answers_are_refused() -> None:
    with pytest.raises(MessageError, match="1 bytes too many"):
        decode_question(body(encode_question(QUESTION)) + b"\0")
    table = body(encode_answer(Answer(1, table=drawn_table(1))))
    for bad in (table[:-1], table[:24], body(encode_answer(Answer(1))) + b"x"):
        with pytest.raises(MessageError):
            decode_answer(bad)


def test_long_error_is_cut() -> None:
    assert len(encode_answer(Answer(1, error="é" * 5000))) < 300


def test_limits_are_those_of_the_plugin() -> None:
    header = (SOURCE_DIR / "brain" / "message.h").read_text()
    assert f"kMaxArtifactBytes = {protocol.MAX_ARTIFACT_BYTES};" in header
    assert f"kMaxSystemBytes = {protocol.MAX_SYSTEM_BYTES};" in header
    tasks = tuple(KeyCalls(c, i, (CALL,) * 8) for c in TUNED for i in range(MAX_BINS))
    full = Question(
        1, BrainConfig("a" * 4096, "s" * 200, 1, 8), History(tasks, drawn_table(1, MAX_BINS))
    )
    message = encode_question(full)
    assert len(message) - 4 <= protocol.MAX_ASK_BYTES
    assert decode_question(body(message)) == full
