"""Data that training reads."""
