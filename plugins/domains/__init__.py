"""Methods and backbones of domains."""
