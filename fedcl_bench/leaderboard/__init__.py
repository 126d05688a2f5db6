"""The leaderboard: submissions of methods, their verification, and the page of those that are kept.

In come finished runs; out goes a folder for a pull request. What is shown of a submission is in its
``submission.json``; what it is computed from is beside that.
"""
