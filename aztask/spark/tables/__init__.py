"""Delta Lake tables of events, results and dead letters, through the package ``deltalake``."""
