"""Fits NCCL's own tuning constants to measured times, so that NCCL decides better by itself.

factors     what is fitted, and as the constants that a tuner writes
fit         the search, over what NCCL would choose
"""
