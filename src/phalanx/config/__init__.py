"""Configuration: schema and loading."""

from phalanx.config.load import help_text, load, save
from phalanx.config.messages import ConfigError

__all__ = ["ConfigError", "help_text", "load", "save"]
