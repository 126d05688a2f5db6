"""What a server learns from uploads: attacks on a run's messages, and how well they do.

In comes a run's configuration, out go attack metrics at several levels of noise.
"""
