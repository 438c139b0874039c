"""vLLM-omni in the processes of the ranks."""
