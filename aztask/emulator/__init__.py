"""A local Service Bus: AMQP 1.0 and the administration API over the embedded engine.

``amqp/`` speaks the protocol without touching a socket, ``broker/`` gives the links their meaning
(queues, sessions, topics, management operations), ``admin/`` answers the HTTP administration
requests, and the files of this folder run them.
"""
