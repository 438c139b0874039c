"""Whether a cluster is fit to train on, found out in a minute: what tasks/check_cluster.py does."""
