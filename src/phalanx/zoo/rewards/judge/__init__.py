"""Rewards that ask a vision-language or language model, one per file."""
