"""Makes all Python workers of the tests' sessions import PySpark from compiled files.

Python loads this module at its start. It is also for workers that plan a data source: they would
compile PySpark's archive, and Spark has no setting for them.
"""

from aztask.spark.workers import leave_archives

leave_archives()
