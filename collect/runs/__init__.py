"""Runs a sweep: rounds of launches, the journal, Parquet parts.

carry_out   what the command line orders, put together
run         round by round, launch by launch
journal     what is on disk, and what a resume has to do
parts       from the journal to Parquet
quarantine  what is not tried again
progress    what a person sees of it
choices     the table that follows from it
"""
