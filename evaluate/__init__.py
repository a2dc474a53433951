"""Proving what a policy is worth: baselines, regret, report."""
