"""One YAML file per dataset."""
