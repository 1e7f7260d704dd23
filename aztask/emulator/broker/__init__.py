"""The service behind the links: entities, messages, locks, sessions, rules, management requests.

Rules
1. Everything here runs on one thread, the event loop's.
2. Every write to the store is a `Change`. All changes of one turn of the loop share a transaction,
   and clients are answered only after its commit.
"""
