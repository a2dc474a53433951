"""AutoCCL's algorithm 2: coordinate descent in one subspace (Xu et al., NSDI 2025).

Each knob in turn is moved as long as the call gets faster; the step is in proportion to the last
gain of bandwidth, and the least step after one that did not pay. Where the paper leaves something
open, this is what its published code does (gbxu/autoccl @63acb15): a knob is tried upwards and
downwards, a gain starts the count of failures anew, and the subspace is done when no knob pays
either way. What was measured is not measured again.

A generator: it yields the action to measure and is sent its time.
"""

from collections.abc import Generator

from dynamiccl.serve.search.space import AXES, SearchSpace


def descend(space: SearchSpace, start: int, known: dict[int, float]) -> Generator[int, float, int]:
    """Yield actions to measure, be sent their times in us; returns the fastest of the subspace.

    `known` holds the times measured so far by action, and gets the new ones.
    """
    here = start
    if here not in known:
        known[here] = yield here
    failures, axis, sign, stride = 0, 0, 1, 1
    while failures < 2 * len(AXES):
        there = space.step(here, axis, sign * stride)
        if there is not None and there not in known:
            known[there] = yield there
        if there is not None and known[there] < known[here]:
            gain = 1.0 - known[there] / known[here]  # of bandwidth, as a share of the new one
            stride = max(1, round(gain * space.line_length(there, axis)))
            here, failures = there, 0
            continue
        failures, stride = failures + 1, 1
        if sign > 0:
            sign = -1
        else:
            axis, sign = (axis + 1) % len(AXES), 1
    return here
