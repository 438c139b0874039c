"""The tasks beside training."""
