"""From records to tables, figures and tests beside the papers' numbers.

In come finished runs, out goes text or a picture. Nothing here trains, and nothing is parsed from a log.
"""
