"""What hides secrets in recordings; nothing is recorded."""

from __future__ import annotations

from typing import Any


def _nothing(**_options: Any) -> None:
    """Nothing is recorded."""


add_general_regex_sanitizer = add_oauth_response_sanitizer = add_remove_header_sanitizer = _nothing
