"""Attacks: malicious clients, and what they upload."""
