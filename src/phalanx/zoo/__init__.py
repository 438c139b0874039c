"""Models' families, rewards, environments, adapters, loggers and engines, each found by its name."""
