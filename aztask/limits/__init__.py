"""Pauses and limits that hold for all workers of a fleet, kept in the result store.

``control`` has what operators paused, ``rates`` the slots of rates, and ``permits`` what may run at
the same time.
"""
