"""An app on a service that does not answer, unless a test starts one at its address."""

import os

from aztask import App

app = App("busy", broker=os.environ["SPARK_SHOP_BUSY"])


@app.task
def resize(path: str, width: int) -> str:
    return f"{path}:{width}"
