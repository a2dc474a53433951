"""Evaluation of policies: baselines, regret, gate, reports."""
