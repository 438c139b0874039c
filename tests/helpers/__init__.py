"""Test helpers: tiny models, ranks, jobs, and the inputs that tests share."""
