"""Orders: the table, the task that packs them, and the pages."""
