"""Import of the calls that the deployed plugin recorded: files of all ranks, joined by call."""
