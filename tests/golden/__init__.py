"""Goldens: one kept value for each form that leaves the house, by which old users see a change.

    python -m tests.golden                write all kept values (`make golden-write`)
    python -m tests.golden logs sweeps-   only those whose names begin so
    make golden                           compare

What changes on purpose changes its kept value in the same commit, and the commit says why.
"""
