"""Rewards of texts, a file each."""
