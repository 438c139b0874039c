"""Pure tensor computations in float32, independent of ranks, models and files."""
