"""Where task code runs: child processes of the worker, never the worker itself."""
