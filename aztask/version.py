"""The version of the aztask package."""

__version__ = "0.1.0"
