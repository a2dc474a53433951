"""Where the trials of a study run: processes here, or a Slurm array.

backend       what all of them have in common
processes     processes of this machine
slurm_array   an array of batch jobs
"""
