"""Graphs of tasks as plain values: signatures, chains, groups and chords, and what they compile to.

Nothing here sends, stores or connects. `aztask.workflows` acts on these values.
"""
