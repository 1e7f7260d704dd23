"""A local Service Bus: AMQP 1.0 and the administration API over the embedded engine.

* ``amqp/`` implements the protocol. It touches no socket.
* ``broker/`` implements the service: queues, sessions, topics and management operations.
* ``admin/`` answers the HTTP administration requests.
* The modules of this folder start, serve and show an emulator.
"""
