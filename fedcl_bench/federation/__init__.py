"""The federated continual loop and its server. ``loop.py`` reads as the papers' algorithm, from top to bottom.

In come the parts of a run (stream, backbone, method, settings), out comes its progress after every round.
"""
