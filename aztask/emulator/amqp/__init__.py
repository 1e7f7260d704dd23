"""AMQP 1.0 (OASIS, October 2012) as a sans-I/O server endpoint: bytes in, calls and bytes out.

Why our own code: the AMQP 1.0 libraries on PyPI are clients. The one with a server side,
python-qpid-proton (0.40), is C source that pip has to compile.

Rules
1. Nothing here opens a socket, reads a clock or knows what a queue is.
2. Input from the peer is never trusted: sizes, counts, types and states are checked before use.
   Every violation is one `AmqpError` with a condition of the specification.
3. Message bodies pass through as bytes. Only the parts that the broker needs are decoded.
"""
