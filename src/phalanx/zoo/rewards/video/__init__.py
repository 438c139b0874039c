"""Rewards of whole videos, one per file."""
