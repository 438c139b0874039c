"""Rewards of texts, one per file."""
