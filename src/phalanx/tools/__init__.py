"""Makers of small models and data, and conversions."""
