"""Whether the GPUs of a node are well while trials run, and what a node is."""
