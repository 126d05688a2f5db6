"""Backbones of users: a score of a user and an item."""
