"""Compute and collectives on one GPU: the trap that tuning in isolation walks into."""

from dataclasses import replace

import pytest

from dynamiccl.nccl import Algorithm, Collective, Config, Protocol
from dynamiccl.simulator.system import Call, Contention, Group, Parts
from dynamiccl.simulator.systems import ParametricSystem, find_system

MIB = 1 << 20
ALONE = Contention(num_sms=100, memory_gbytes_per_s=2000, memory_share=0.0, call_slowdown=0.0)


def parts(num_channels: int, moving_us: float) -> Parts:
    return Parts(Algorithm.Ring, Protocol.Simple, num_channels, 0.0, moving_us, 0.0)


def iteration_us(contention: Contention, parts: Parts, size_bytes: int, compute_us: float) -> float:
    """By the rules of simulator/system.py: when compute and the call beside it are done, us."""
    waiting_us = min(contention.held_us, compute_us / 4)
    call_us = waiting_us + parts.time_us(contention.surroundings(1.0))
    speed = contention.compute_speed(parts, size_bytes)
    if compute_us / speed >= call_us:
        return call_us + (compute_us - call_us * speed)
    # Compute ends first; what is left of the call goes on undisturbed.
    together_us = compute_us / speed
    left = min(1.0, (call_us - together_us) / (call_us - waiting_us))
    return together_us + left * parts.quiet_us


def test_channels_and_memory_slow_compute_and_compute_slows_a_call() -> None:
    assert ALONE.compute_speed(parts(20, 1000.0), 1) == pytest.approx(0.8)
    bound = Contention(100, 1000, memory_share=1.0, call_slowdown=0.0)
    half = round(1000 * 1000.0 * 1000 / 4)
    assert bound.compute_speed(parts(0, 1000.0), half) == pytest.approx(0.5)
    assert ALONE.compute_speed(parts(0, 1000.0), half) == 1.0
    slowed = replace(ALONE, call_slowdown=1.0).surroundings(1.0)
    assert parts(50, 1000.0).time_us(slowed) == pytest.approx(2000.0)
    # 500 us of compute take 1,000; by then half of the call is done, the rest is undisturbed.
    around = replace(ALONE, call_slowdown=1.0)
    assert iteration_us(around, parts(50, 1000.0), 1, 500.0) == pytest.approx(1500.0)


@pytest.mark.parametrize(
    ("name", "size_bytes"), [("a100-nvswitch", 4 * MIB), ("b300-nvlink", 64 * MIB)]
)
def test_fastest_alone_is_not_fastest_for_the_iteration(name: str, size_bytes: int) -> None:
    system = find_system(name)
    assert isinstance(system, ParametricSystem)
    call = Call(Group(1, 8), Collective.AllReduce, size_bytes)
    counts = range(1, system.max_channels(call.group, Algorithm.Ring) + 1)
    runs = {n: system.parts(call, Config(Algorithm.Ring, Protocol.Simple, n)) for n in counts}
    best_alone = min(counts, key=lambda n: runs[n].quiet_us)

    def took_us(num_channels: int) -> float:
        return iteration_us(system.contention, runs[num_channels], size_bytes, 8000.0)

    best = min(counts, key=took_us)
    assert best < best_alone
    # The trap: the call is slower with fewer channels, and the iteration faster.
    assert runs[best].quiet_us > 1.1 * runs[best_alone].quiet_us
    assert took_us(best_alone) > 1.02 * took_us(best)


def test_eight_a100_lose_about_what_was_measured_by_too_many_channels() -> None:
    system = find_system("a100-nvswitch")
    assert isinstance(system, ParametricSystem)
    call = Call(Group(1, 8), Collective.AllReduce, 4 * MIB)

    def took_us(num_channels: int) -> float:
        ran = system.parts(call, Config(Algorithm.Ring, Protocol.Simple, num_channels))
        return iteration_us(system.contention, ran, call.size_bytes, 8400.0)

    # Measured, Ring and Simple beside 8.4 ms of compute: 8,448 us with 4 channels, 9,284 with 24.
    assert took_us(24) / took_us(4) == pytest.approx(9284 / 8448, abs=0.06)
