"""Families of flow-matching models, one per file."""
