"""The test suite of azure-servicebus, run against the emulator: ``tox -e sdk-suite``.

Microsoft ships the suite in the SDK's source distribution; nothing of it is kept here. It is
downloaded, unpacked and run as it is. Its helpers, which Microsoft does not publish, are replaced
by those in ``shim``: ``devtools_testutils``, and the management clients that create queues and
topics.

* `download`: the source distribution.
* `service`: the emulator that stands for the service, and how the SDK reaches it.
* `plugin`: what pytest needs to run the suite.
* `known`: the tests that fail, each with its cause.
* ``python -m tests.sdksuite`` runs it all and compares.
"""
