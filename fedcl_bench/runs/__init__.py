"""One run and its record: plugins, configuration, hash, execution, files.

In come names and settings, out goes a folder that tells all that the run did; the same run is never made twice.
"""
