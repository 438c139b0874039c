"""Converters of models, and repairs of installations."""
