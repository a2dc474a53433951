"""Learning from measurements: recipes, networks, d3rlpy algorithms, tracking."""
