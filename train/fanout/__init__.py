"""Backends that run the trials of a study: local processes, a Slurm array, or a Ray cluster.

backend       what all of them have in common
processes     processes of this machine
slurm_array   an array of batch jobs
ray_cluster   tasks of a Ray cluster; joined by train/ray_join.py
"""
