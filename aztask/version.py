"""The version of the aztask package, and what a worker calls the code that it runs."""

from __future__ import annotations

__version__ = "0.1.0"


def release_of(version: str | None) -> str:
    """What a worker reports: the version of aztask and, if it has one, that of its app."""
    return __version__ if version is None else f"{__version__} {version}"


def shown_release(release: str) -> str:
    """A report of `release_of` for people: the app's version first; "" if there is none."""
    package, _, app = release.partition(" ")
    if not package:
        return ""
    return f"{app} (aztask {package})" if app else f"aztask {package}"
