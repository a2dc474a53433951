"""NCCL's own constants, fitted to measured times, so that NCCL decides better by itself.

factors     what is fitted, and as the constants that a tuner writes
fit         the search, over what NCCL would choose
"""
