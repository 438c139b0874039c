"""Rewards for whole videos, a file each."""
