"""Sweep files: the format, and the trials that they declare (pure).

settings   the tables of a sweep file and their rules
sizes      message sizes, and how nccl-tests can walk them
trial      one point of the grid, and what it needs a process of its own for
load       from the text of a file to its trials
plan       what a sweep would start, leave out and take
"""
