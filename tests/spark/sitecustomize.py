"""Python loads this where a test's session starts workers: also those that plan a data source, for
which Spark has no setting, import PySpark from compiled files instead of compiling its archive.
"""

import sys

from aztask.spark.workers import without_archives

sys.path[:] = without_archives(sys.path)
