"""The test suites of Celery and Kombu themselves, on aztask's transport: ``tox -e celery-suite``.

Both projects ship their integration tests in their source distributions; nothing of them is kept
here. They are downloaded, unpacked and run on a local file, on the emulator of Service Bus or on
Azurite, Celery's with a prefork worker and a private Redis for results.

* `download`: the source distributions.
* `redis`: a Redis server for one run.
* `kombusuite`: Kombu's tests for every transport, with what they need from a transport's own tests.
* `known`: the tests that fail, each with its cause.
* ``python -m tests.celerysuite [celery|kombu] [local|servicebus|storagequeue] [PYTEST ARGUMENTS]``
  runs and compares.
"""
