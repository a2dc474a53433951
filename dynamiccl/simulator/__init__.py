"""The simulated world: systems, their surroundings, and the jobs that run in it."""
