"""Plans a sweep before it runs: processes, hours, and what fits in given hours.

times      the time of a call, by the simulator's model of the sweep's group
processes  what a round starts, and the seconds of it by what they go to
adaptive   an adaptive sweep, played in the simulator
plan       the plan of a sweep
fewer      what a shorter sweep leaves out
fitting    the sweep that fits in given hours
show       a plan as text
command    what `dynamiccl-collect plan` does
"""
