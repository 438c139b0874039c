"""vLLM-omni inside the ranks."""
