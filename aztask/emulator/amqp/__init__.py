"""AMQP 1.0 (OASIS, October 2012) as a sans-I/O server endpoint: bytes in, calls and bytes out.

Rules
1. Nothing here opens a socket, reads a clock or knows what a queue is.
2. What the peer sends is never trusted: sizes, counts, types and states are checked before use, and
   every breach is one `AmqpError` with a condition of the specification.
3. Bodies of messages are passed through as bytes; only what the broker must know is decoded.
"""
