"""Pictures and videos as files."""
