"""How messages reach clients: Flower's Grid, or a call in this process."""
