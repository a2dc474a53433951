"""Traces that users have already: NCCL's Inspector, and PyTorch's profiler, recorder and observer.

All become the tables `calls` and `steps`; what a trace does not tell is null, never guessed.
"""

from dynamiccl.collect.traces.reader import Traces, read_traces

__all__ = ["Traces", "read_traces"]
