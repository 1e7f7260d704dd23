"""The local broker, over the embedded engine."""
