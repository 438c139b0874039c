"""Engines of other libraries inside the ranks."""
