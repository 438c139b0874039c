"""Trained models: their weights over the mesh (trained.py), and one package per kind of model."""
