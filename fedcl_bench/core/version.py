"""The suite's version, and that of its numbers."""

__version__ = "0.1.0"

# Of the engine's numbers, and part of every run's hash. Raise it in a commit that changes any of them, and say there
# which and why. A shipped plugin's attribute `numbers` is the same for what it computes.
NUMBERS = 1
