"""The format of a run's record, its reader and its writer.

In come the fields and frames of a run that ended, out come those of all runs of a folder, verified. Nothing here
trains, and nothing imports a plugin.
"""
