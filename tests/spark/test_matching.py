"""Tables that fit a task, and the errors for those that do not. Without a JVM."""

import pytest
from pyspark.sql import types as spark

from aztask import App
from aztask.errors import ConfigurationError, UnknownTask
from aztask.spark.submission.matching import matched
from aztask.spark.submission.submission import Submission


@pytest.fixture(scope="module")
def app():
    made = App("shop", broker="local://:memory:")

    @made.task
    def resize(path: str, width: int, quality: int = 90) -> None: ...

    @made.task(queue="own", expires=60.0)
    def anything(**values: object) -> None: ...

    @made.task_with_context
    def crawl(context: object, url: str) -> None: ...

    @made.task
    def odd(path: str, /, width: int = 1) -> None: ...

    return made


def schema(**columns):
    return spark.StructType([spark.StructField(name, kind) for name, kind in columns.items()])


TEXT, NUMBER = spark.StringType(), spark.IntegerType()
FILES = schema(id=spark.LongType(), path=TEXT, width=NUMBER)


def wish(task="shop.resize", key="id", **options):
    return Submission(task=task, key=key, submission_id="one", app="shop:app", **options)


def test_columns_go_to_arguments_of_their_name(app):
    made = matched(wish(), FILES, app)
    assert made.columns == (("path", "path"), ("width", "width"))
    assert made.queue == "default"


def test_the_key_is_an_argument_where_the_task_takes_it(app):
    made = matched(wish(key="path"), schema(width=NUMBER, path=TEXT), app)
    assert made.columns == (("width", "width"), ("path", "path"))


def test_a_task_that_takes_anything_gets_everything(app):
    made = matched(wish("shop.anything"), FILES, app)
    assert [name for name, _ in made.columns] == ["id", "path", "width"]
    assert (made.queue, made.expires) == ("own", 60.0)
    assert matched(wish("shop.anything", queue="x", expires=5.0), FILES, app).queue == "x"


def test_the_context_is_no_argument(app):
    columns = (("url", "path"),)
    assert matched(wish("shop.crawl", columns=columns), FILES, app).columns == columns


def test_an_unknown_task_needs_its_columns_named(app):
    away = Submission(task="far.away", key="id", submission_id="one", broker="local:///tmp/x.db")
    with pytest.raises(ConfigurationError, match=r"signature of task 'far\.away' is unknown"):
        matched(away, FILES, App("aztask-spark"))


@pytest.mark.parametrize(
    ("table", "options", "words"),
    [
        (FILES, {"key": "ide"}, "no key column 'ide'. Did you mean 'id'"),
        (FILES, {"columns": (("path", "pth"),)}, "no column 'pth'. Did you mean 'path'"),
        (
            schema(id=NUMBER, path=TEXT, widht=NUMBER),
            {},
            "no argument 'widht'. Did you mean 'width'",
        ),
        (schema(id=NUMBER, path=TEXT), {}, "needs 'width', and no column gives it"),
        (FILES, {"columns": (("path", "path"), ("path", "width"))}, "two columns .* 'path'"),
        (FILES, {"task": "shop.resise"}, "no task 'shop.resise'. Did you mean 'shop.resize'"),
        (FILES, {"task": "shop.odd"}, "no argument 'path'"),
        (schema(id=spark.DoubleType(), path=TEXT, width=NUMBER), {}, "key column 'id' is of type"),
        (schema(id=spark.TimestampType(), path=TEXT, width=NUMBER), {}, "cast it to a string"),
        (schema(id=NUMBER, path=TEXT, width=spark.VariantType()), {}, "variant cannot be sent"),
        (
            schema(id=NUMBER, path=TEXT, width=spark.YearMonthIntervalType()),
            {},
            "'width' is of type interval year to month",
        ),
        (
            schema(id=NUMBER, path=TEXT, width=spark.MapType(spark.DateType(), TEXT)),
            {},
            "a map whose keys are date",
        ),
        (
            schema(id=NUMBER, path=TEXT, width=spark.ArrayType(spark.CalendarIntervalType())),
            {},
            "interval cannot be sent",
        ),
        (schema(self=NUMBER, path=TEXT, id=NUMBER), {"task": "shop.anything"}, "called self"),
    ],
    ids=range(14),
)
def test_what_does_not_fit_is_said(app, table, options, words):
    with pytest.raises((ConfigurationError, UnknownTask), match=words):
        matched(wish(**options), table, app)


def test_columns_of_one_name_are_refused(app):
    table = spark.StructType([*FILES.fields, spark.StructField("path", TEXT)])
    with pytest.raises(ConfigurationError, match="several columns 'path'"):
        matched(wish(), table, app)


@pytest.mark.parametrize(
    "kind",
    [
        spark.BooleanType(),
        spark.ByteType(),
        spark.DoubleType(),
        spark.BinaryType(),
        spark.DecimalType(10, 2),
        spark.DateType(),
        spark.TimestampType(),
        spark.TimestampNTZType(),
        spark.DayTimeIntervalType(),
        spark.NullType(),
        spark.VarcharType(5),
        spark.ArrayType(spark.MapType(TEXT, schema(a=spark.DateType()))),
        spark.MapType(NUMBER, TEXT),
    ],
    ids=lambda kind: kind.simpleString(),
)
def test_what_can_travel(app, kind):
    assert matched(wish("shop.anything"), schema(id=NUMBER, value=kind), app).columns


def test_what_json_would_change_is_refused_where_json_is_written():
    app = App("shop", broker="local://:memory:", serializer="json")
    app.task(name="x")(lambda value: None)
    made = Submission(
        task="x", key="id", submission_id="one", app="x", columns=(("value", "value"),)
    )
    for kind in (TEXT, spark.BinaryType(), spark.MapType(TEXT, TEXT)):
        assert matched(made, schema(id=NUMBER, value=kind), app).queue == "default"
    with pytest.raises(ConfigurationError, match=r"map<int,string> would be changed by"):
        matched(made, schema(id=NUMBER, value=spark.MapType(NUMBER, TEXT)), app)
