"""Goldens: what the product said before it was rebuilt, kept small, one test for each.

    python -m tests.golden                write all kept values (`make golden-write`)
    python -m tests.golden logs sweeps-   only those whose names begin so
    make golden                           compare

A golden sees the product as its user does: through a command, or a file that a command wrote. So it
outlives every change inside. What changes on purpose changes its kept value in the same commit,
and the commit says why.
"""
