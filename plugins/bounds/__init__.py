"""Bounds: what methods are held against, as popularity, training alone, or one party with all data."""
