"""A check, in a minute, that a cluster is fit to train on (tasks/check_cluster.py)."""
