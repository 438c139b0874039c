"""The job around the loop: its start, assembly, checkpoints, validation, records and end."""
