"""The Storage queue broker, over requests of its own and ``azure-storage-queue``."""
