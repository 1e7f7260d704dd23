"""The App, which a program declares its tasks on and sends them with; see `aztask.app.app`."""

from aztask.app.app import App

__all__ = ["App"]
