"""The report of event statistics: one HTML page, JSON, or tables on a terminal."""
