"""One delivery's life in a worker, from its receipt to its settlement."""
