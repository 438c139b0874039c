"""Ranks: meshes and groups, sharding, collectives, seeds. Only this package creates process groups."""
