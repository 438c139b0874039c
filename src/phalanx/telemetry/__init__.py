"""Metrics, loggers, records of samples, and the report of a run."""
