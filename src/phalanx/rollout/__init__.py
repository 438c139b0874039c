"""Sampling, by kind of policy."""
