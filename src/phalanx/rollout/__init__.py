"""Sampling engines, a file each."""
