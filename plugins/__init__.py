"""The shipped plugins, one file each, in folders by what they are; see docs/plugins.md."""
