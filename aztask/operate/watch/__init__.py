"""Watching: rules say what a person must hear of, and a webhook says it: once, and at its end.

`rules` reads the file, `conditions` finds what holds now, `watcher` decides what is new and
keeps that in the result store, and `webhooks` sends.
"""
