"""An app on a service that does not answer: nothing listens there but in tests that say so."""

import os

from aztask import App

app = App("busy", broker=os.environ["SPARK_SHOP_BUSY"])


@app.task
def resize(path: str, width: int) -> str:
    return f"{path}:{width}"
