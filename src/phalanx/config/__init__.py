"""Configuration: schema and loading."""

from phalanx.config.load import ConfigError, help_text, load, save

__all__ = ["ConfigError", "help_text", "load", "save"]
