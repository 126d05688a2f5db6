"""Local training: what the clients of a round do with the parameters that the server sent.

In come a chunk of clients, the model and the round's keys, out go changes of parameters, losses and uploads.
``strategies.py`` says how clients are trained and is the only file that chooses.
"""
