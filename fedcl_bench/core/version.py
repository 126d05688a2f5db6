"""The suite's version, and that of its numbers."""

__version__ = "0.1.0"

# Part of every run's hash. Raise it in a commit that changes any number, and say which and why there.
NUMBERS_VERSION = 1
