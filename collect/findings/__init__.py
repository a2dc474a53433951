"""What a data set holds: summaries, the best configs by size, pictures."""
