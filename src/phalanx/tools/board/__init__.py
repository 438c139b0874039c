"""The report of a run, the live page, and the commands about runs."""
