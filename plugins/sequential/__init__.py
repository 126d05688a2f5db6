"""Sequential backbones: a score of a history, or of a session, and an item."""
