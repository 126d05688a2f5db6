"""One file per method or backbone; see docs/plugins.md."""
