"""Tools that know nothing of tasks, queues or Azure."""
