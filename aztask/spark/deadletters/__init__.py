"""Dead letters as a DataFrame, and the replay of those that a query selects."""

from aztask.spark.deadletters.letters import dead_letters, groups, replay, sample, selections

__all__ = ["dead_letters", "groups", "replay", "sample", "selections"]
