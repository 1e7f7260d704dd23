"""The commands that install what an extra of aztask brings."""

from __future__ import annotations


def install_command(extra: str) -> str:
    """The command to type, such as ``pip install "aztask[blob]"``.

    The quotes are double: cmd.exe on Windows passes single ones on to pip, and zsh reads brackets
    without quotes as a pattern.
    """
    return f'pip install "aztask[{extra}]"'
