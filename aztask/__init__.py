"""Python functions as background tasks on Azure queues, under leases."""
