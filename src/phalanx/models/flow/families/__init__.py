"""A file each family of flow-matching models."""
