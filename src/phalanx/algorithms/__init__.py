"""Learning rules, a file each: `Config` (its keys) and `Rule` (advantage and loss), known by the file's name."""
