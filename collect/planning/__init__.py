"""Plans a sweep before it runs: processes and hours.

times      the time of a call, by the simulator's model of the sweep's group
processes  what a round starts, and the seconds of it by what they go to
plan       the plan of a sweep
show       a plan as text
fresh      the sweep that a gate needs
"""
