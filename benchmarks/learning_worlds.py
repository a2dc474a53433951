"""The worlds of evaluate/worlds/kinds.py, by the names used in benchmarks."""

from dynamiccl.evaluate.worlds.kinds import FIVE, WORLDS

__all__ = ["FIVE", "WORLDS"]
