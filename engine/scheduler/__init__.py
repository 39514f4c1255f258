"""Which tokens are computed next, and for whom. Runs without torch."""
