"""The real runner: nccl-tests through a launcher, many configs in one process.

programs   the binaries, and which features their release has
layout     which launches measure a round
grid       in which order one launch walks its picks
command    what is started, with which environment
output     from what it printed to rows, pick by pick
read_back  from NCCL's own log to what really ran
topology   NCCL's dumps, kept once for each group
runner     all of it, process by process
"""
