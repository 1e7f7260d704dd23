"""Rows of DataFrames as tasks."""
