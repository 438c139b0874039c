"""Training loops and their components."""
