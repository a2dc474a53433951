"""Finds slow GPUs, NICs and nodes of a cluster from times of many small communicators.

pairings   which launches pair up the GPUs of a cluster, few of them
short_run  a sweep of these
readings   from rows of a data set to times of communicators
model      what each rank adds to these, and what is beyond noise
findings   named parts: a GPU, a NIC, a node, a pair
late       processes that others wait for, in collectives of all ranks
command    `dynamiccl-collect health`
"""
