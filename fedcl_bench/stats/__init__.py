"""Statistics and guarantees that need no run: significance tests, privacy accounting, clipping and noise.

In come arrays of scores or the scale of a mechanism, out go p-values, intervals, epsilons and protected numbers.
"""
