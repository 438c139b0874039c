"""Sampling engines of language models, a file each."""
