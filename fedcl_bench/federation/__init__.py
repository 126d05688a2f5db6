"""The federated continual loop and its server. ``loop.py`` reads as the papers' algorithm, from top to bottom.

It asks the same of both kinds of clients: of one user each (``cross_device.py``), and of many (``cross_silo.py``:
domains, or one client without a federation). In come the parts of a run (stream, backbone, method, settings), out
comes its progress after every round.
"""
