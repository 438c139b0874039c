"""Models that are trained: weights over the mesh (trained.py), and what each kind computes."""
