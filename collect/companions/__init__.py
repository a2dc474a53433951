"""What runs on every node beside the trials, or is asked of them before.

nodes      start and end a program on each node, through the launcher
facts      what the nodes are, and whether we have them to ourselves
watch      samplers of the GPUs' health, and what they say of a stretch of time
"""
