"""Checks of a machine before a sweep, each with advice.

check        what a check says
machine      all that a check may ask of the machine, and the real one
context      what the sweep needs
benchmark, library, plugins, settings   nccl-tests, NCCL, tuners, NCCL's settings
gpus, network, host, cluster            the hardware and what runs on it
examine      all of them, in order
"""
