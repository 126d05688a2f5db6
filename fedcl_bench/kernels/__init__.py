"""Numbers on rows of tensors, where speed is decided: compiled kernels, memory, the highest of many scores.

In come plain tensors, out go plain tensors; nothing here knows what a client, an item or a round is.
"""
