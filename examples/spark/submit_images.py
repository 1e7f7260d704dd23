"""Submit the rows of images.csv: python submit_images.py [SUBMISSION]"""

import sys

from shop import thumbnail

from aztask.spark import get_session, submit

spark = get_session(master="local[2]")
images = spark.read.csv("images.csv", header=True, schema="path STRING, width INT, owner STRING")
report = submit(
    images.where("width >= 100"),
    thumbnail,
    key="path",
    columns=["path", "width"],
    submission_id=sys.argv[1] if len(sys.argv) > 1 else "images",
)
print(f"{report.rows} rows, {report.sent} sent, {report.failed} failed")
spark.stop()
