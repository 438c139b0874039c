"""Rewards that ask a vision-language model, a file each."""
