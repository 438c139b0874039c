"""Flow-matching models of pictures and videos."""
