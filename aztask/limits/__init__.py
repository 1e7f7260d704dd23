"""Pauses and limits that hold for all workers of a fleet, kept in the result store.

``control`` has what operators paused.
"""
