"""The same for tests that are coroutines."""

from devtools_testutils import recorded_by_proxy as recorded_by_proxy_async

__all__ = ["recorded_by_proxy_async"]
