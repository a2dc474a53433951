"""Two sweeps of one machine against each other: what got slower or faster, and through what."""
