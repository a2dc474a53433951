"""The worlds of the product (evaluate/worlds/kinds.py), by the names that benchmarks know."""

from dynamiccl.evaluate.worlds.kinds import FIVE, WORLDS

__all__ = ["FIVE", "WORLDS"]
