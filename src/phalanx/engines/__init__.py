"""Inference engines inside the ranks."""
