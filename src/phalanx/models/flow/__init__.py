"""Flow-matching models of images and videos."""
