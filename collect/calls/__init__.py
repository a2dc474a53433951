"""Taking in what the deployed plugin recorded: the files of all ranks, joined to one row a call."""
