"""Names that an app offers and that live in a layer above it; imported when first used.

A program that only sends must not import the worker. So `aztask.app` names such a class here
instead of importing it. The architecture test lists the only names that may be used here.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def late(module: str, name: str) -> Any:
    """Import `module` and return its `name`."""
    return getattr(import_module(module), name)


# -- the commands that install what an extra of aztask brings ------------------------------


def install_command(extra: str) -> str:
    """The command to type, such as ``pip install "aztask[blob]"``.

    The quotes are double: cmd.exe on Windows passes single ones on to pip, and zsh reads brackets
    without quotes as a pattern.
    """
    return f'pip install "aztask[{extra}]"'
