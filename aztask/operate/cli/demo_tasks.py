"""The app that the demo's worker loads; the environment names its broker."""

from __future__ import annotations

from aztask.app import App
from aztask.operate.cli.demo_work import register

app = App("demo")
examine = register(app)
