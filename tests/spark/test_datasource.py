"""The errors of the data source, called as Spark calls it; `test_submit` uses a real Spark."""

import pytest
from pyspark.sql.types import IntegerType, StringType, StructField, StructType

from aztask.errors import ConfigurationError
from aztask.spark.submission.datasource import AztaskDataSource

COLUMNS = StructType([StructField("path", StringType()), StructField("width", IntegerType())])
GIVEN = {"app": "spark_shop", "task": "shop.resize", "key": "path", "submission_id": "one"}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"key": "pth"}, "no key column 'pth'"),
        ({"submission_id": ""}, "'submission_id' is missing"),
        ({"rat": "5"}, "no option 'rat'. Did you mean 'rate'"),
        ({"rate": "5"}, "rate needs writers"),
    ],
)
@pytest.mark.usefixtures("shop")
def test_options(change, words):
    source = AztaskDataSource(GIVEN | change)
    with pytest.raises(ConfigurationError, match=words):
        source.writer(COLUMNS, overwrite=False)


@pytest.mark.usefixtures("shop")
def test_what_fits_is_written():
    writer = AztaskDataSource(GIVEN).writer(COLUMNS, overwrite=False)
    assert type(writer).__name__ == "Writer"
    with pytest.raises(ConfigurationError, match="cannot be overwritten"):
        AztaskDataSource(GIVEN).writer(COLUMNS, overwrite=True)
