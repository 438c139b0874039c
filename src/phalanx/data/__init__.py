"""Training data: prompts and images from files."""
