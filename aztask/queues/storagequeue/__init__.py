"""The Storage queue broker: its own requests for messages, ``azure-storage-queue`` for the rest."""
