"""The tasks other than training."""
