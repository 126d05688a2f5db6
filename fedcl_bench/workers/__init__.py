"""Where runs and clients are computed: processes on this machine, or a Ray cluster.

In come jobs, or one run divided by clients, out come the same results as in one process.
"""
