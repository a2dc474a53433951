"""Import of existing traces: NCCL's Inspector, PyTorch's profiler, flight recorder, observer.

All become the tables `calls` and `steps`; what a trace does not tell is null, never guessed.
"""

from dynamiccl.collect.traces.reader import Traces, read_traces

__all__ = ["Traces", "read_traces"]
