"""Rows in a table of Azure Tables."""
