"""``aztask top``: queues, workers, running tasks and failures, live on a terminal."""
