"""Results in Azure Tables, with large values in blobs."""
