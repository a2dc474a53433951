"""A sweep as it runs: rounds of launches, a journal, parts; and what is said about it before.

plan        what would be started, and how long it takes
carry_out   what the command line orders, put together
run         round by round, launch by launch
journal     what is on disk, and what a resume has to do
parts       from the journal to Parquet
quarantine  what is not tried again
progress    what a person sees of it
choices     the table that follows from it
"""
