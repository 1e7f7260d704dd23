"""Events as DataFrames, their compaction, and statistics of them."""
