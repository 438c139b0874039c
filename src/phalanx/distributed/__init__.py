"""Ranks: meshes and groups, sharding, collectives, seeds. The only package that makes process groups."""
