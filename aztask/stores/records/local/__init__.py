"""Results in a local SQLite file."""
