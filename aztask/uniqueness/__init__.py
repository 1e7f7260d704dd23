"""Unique tasks: of calls with one key, one task waits or runs at a time.

::

    send       write the holder with the signed message -> publish -> note that it is sent
    worker     at its start or at its end: free the key, if the holder is this task
    repair     a holder that was not sent is sent, one whose life has ended is freed

Rules
1. A key has one holder, changed by compare-and-set. The holder has the signed message until it is
   sent: if the sender dies, a later caller or any worker's housekeeping sends it, under its id.
2. A key is freed by compare on (task id, generation): a late redelivery never frees the key of the
   task after it. Repeated settlements free it again, which changes nothing.
3. A holder has a life. Whatever is lost, its key is free again after that.
4. A task whose end is recorded holds no key, even if the worker died before it freed it.

Modules: `rules` (options), `keys` (arguments become a key), `engine` (and holders as
bytes).
"""
