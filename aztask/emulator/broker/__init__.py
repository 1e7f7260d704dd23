"""What the links mean: entities, messages, locks, sessions, rules and management requests.

Rules
1. Everything here runs on one thread, the event loop's.
2. Whatever changes the store is a `Change`: it runs inside the loop turn's one transaction, and the
   peer is answered only after that transaction is committed.
"""
