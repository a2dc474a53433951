"""One iteration by the rules of simulator/system.py; `World` does them all at once."""

from dynamiccl.simulator.system import Contention, Parts


def iteration_us(contention: Contention, parts: Parts, size_bytes: int, compute_us: float) -> float:
    """Compute of `compute_us` alone with the call beside it: when both are done, us."""
    waiting_us = min(contention.held_us, compute_us / 4)
    call_us = waiting_us + parts.time_us(contention.surroundings(1.0))
    speed = contention.compute_speed(parts, size_bytes)
    if compute_us / speed >= call_us:
        return call_us + (compute_us - call_us * speed)
    # Compute ends first; what is left of the call goes on undisturbed.
    together_us = compute_us / speed
    left = min(1.0, (call_us - together_us) / (call_us - waiting_us))
    return together_us + left * parts.quiet_us
