"""What every room may use: errors, files, texts, typed settings, sizes tuned by measurement, threads, the version.

In come plain values; nothing here knows of clients, streams or records.
"""
