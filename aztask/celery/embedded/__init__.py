"""What a Celery message embeds: the rest of its chain, callbacks, errbacks, a chord's body."""
