"""A check that a cluster is fit to train on, which takes a minute (tasks/check_cluster.py)."""
