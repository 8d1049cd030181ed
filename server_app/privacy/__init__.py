"""What noise is worth (epsilon), and an attack on class statistics."""
