"""A shop whose work runs in the background."""
