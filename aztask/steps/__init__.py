"""Durable steps: what a task did, recorded, so that its next run goes on after it."""
