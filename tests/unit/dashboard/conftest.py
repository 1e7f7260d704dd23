"""The fixtures of the dashboard's tests, which tests in Chromium share."""

from dashboardshop import full, shop

__all__ = ["full", "shop"]
