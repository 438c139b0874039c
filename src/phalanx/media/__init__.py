"""Image and video files."""
