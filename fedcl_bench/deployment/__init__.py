"""Runs on real clients: each a process with its own data and private parameters, which Flower carries messages to."""
