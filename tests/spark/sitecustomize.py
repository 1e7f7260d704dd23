"""Python loads this where a test's session starts workers: also those that plan a data source, for
which Spark has no setting, import PySpark from compiled files instead of compiling its archive.
"""

from aztask.spark.workers import leave_archives

leave_archives()
