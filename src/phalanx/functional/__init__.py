"""Pure tensor mathematics in float32; nothing here knows of ranks, models or files."""
