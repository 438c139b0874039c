"""Rewards of images, also applied to frames of videos, one per file."""
