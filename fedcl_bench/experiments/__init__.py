"""Many runs: grids, tuning, and the papers' experiments as lists of runs.

In come a paper's table or lists of names, out goes a plan of runs and what became of each.
"""
