"""Loggers: one file each, called as the library that it needs."""
