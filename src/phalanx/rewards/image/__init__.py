"""Rewards of pictures and videos, a file each."""
