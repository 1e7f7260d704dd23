"""Code that Storage queues, Tables and blobs share: credentials, connections and requests."""
