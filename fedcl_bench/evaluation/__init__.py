"""How good a model is: ranking of items for users or sessions, drift between steps, continual metrics.

In come a model and what to find, out go per-user scores and the numbers made of the matrix R[t, s].
"""
