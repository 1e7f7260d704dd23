"""Submission: each row of a DataFrame becomes one task."""
