"""Sampling engines, by kind of policy."""
