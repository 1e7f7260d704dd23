"""A table becomes tasks, and their results become a table: a DAG of Apache Airflow 3.

It needs the variable SHOP, the folder of the app and the table. Airflow itself needs neither aztask
nor Spark: AZTASK names the program of an environment that has both.
"""

import os
from datetime import timedelta

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk import DAG

SHOP = os.environ["SHOP"]
AZTASK = os.environ.get("AZTASK", "aztask")
# A run has one submission, whichever try sends it: what was sent is not sent twice.
SUBMISSION = "images-{{ run_id }}"

with DAG("thumbnails", schedule=None, catchup=False):
    submit = BashOperator(
        task_id="submit",
        cwd=SHOP,
        bash_command=f"""{AZTASK} spark submit -A shop --input images.csv \
            --schema "path STRING, width INT, owner STRING" --columns path,width \
            --task shop.thumbnail --key path --submission-id "{SUBMISSION}" --manifest manifests""",
        retries=3,
        retry_delay=timedelta(minutes=1),
    )
    # Each try writes a folder of its own: one that was killed leaves half a table.
    collect = BashOperator(
        task_id="collect",
        cwd=SHOP,
        bash_command=f"""{AZTASK} spark results -A shop --submission-id "{SUBMISSION}" \
            --manifest manifests --wait 1h \
            -o "thumbnails/{{{{ run_id }}}}/{{{{ ti.try_number }}}}" """,
        retries=3,
        retry_delay=timedelta(minutes=1),
    )
    submit >> collect
