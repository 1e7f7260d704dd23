"""The app that the demo's workers load; the demo tells them where its broker is by environment."""

from __future__ import annotations

from aztask.app import App
from aztask.cli.demo_work import register

app = App("demo")
examine = register(app)
