"""Tables that fit a task, and the errors for those that do not. Without a JVM."""

from dataclasses import dataclass
from datetime import date, datetime
from decimal import Decimal
from enum import Enum
from pathlib import Path
from typing import Literal
from uuid import UUID

import pytest
from pyspark.sql import types as spark

from aztask import App
from aztask.errors import ConfigurationError, UnknownTask
from aztask.spark.submission.matching import matched
from aztask.spark.submission.submission import Submission


class Color(Enum):
    RED = "red"


@dataclass
class Line:
    name: str
    price: Decimal

    def __post_init__(self):
        raise AssertionError("only the types of columns are looked at")


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

    @made.task
    def typed(
        whole: int = 0,
        number: float = 0.0,
        text: str = "",
        day: date = date(2000, 1, 1),
        moment: datetime | None = None,
        price: Decimal = Decimal(0),
        ident: UUID | None = None,
        file: Path = Path(),
        color: Color = Color.RED,
        size: Literal["S", "L"] = "S",
        counts: list[int] = [],  # noqa: B006
        by_name: dict[str, int] = {},  # noqa: B006
        line: Line | None = None,
        lines: list[Line] = [],  # noqa: B006
        pair: tuple[int, str] = (0, ""),
        unknown: "Missing" = None,  # noqa: F821
        bare=None,
    ) -> None: ...

    @made.task
    def nulls(a: int, b: int | None, c, d: int = 1, e: int | None = 2, f=3) -> None: ...

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


LINE = schema(name=TEXT, price=spark.DoubleType())
FITS = {
    "whole": (NUMBER, spark.LongType(), spark.BooleanType(), spark.NullType()),
    "number": (spark.DoubleType(), spark.FloatType(), NUMBER),
    "text": (TEXT, spark.VarcharType(3)),
    "day": (spark.DateType(),),
    "moment": (spark.TimestampType(), spark.TimestampNTZType()),
    "price": (spark.DecimalType(10, 2),),
    "file": (TEXT,),
    "color": (TEXT,),
    "size": (TEXT,),
    "counts": (spark.ArrayType(NUMBER),),
    "by_name": (spark.MapType(TEXT, NUMBER), schema(a=NUMBER)),
    "line": (LINE, spark.MapType(TEXT, TEXT)),
    "lines": (spark.ArrayType(LINE),),
    "unknown": (TEXT, NUMBER, LINE),
    "bare": (TEXT, NUMBER, LINE),
}


@pytest.mark.parametrize(
    ("parameter", "kind"),
    [(name, kind) for name, kinds in FITS.items() for kind in kinds],
    ids=lambda each: each if isinstance(each, str) else each.simpleString(),
)
def test_a_column_of_the_annotated_type(app, parameter, kind):
    table = schema(id=NUMBER, **{parameter: kind})
    assert matched(wish("shop.typed"), table, app).columns == ((parameter, parameter),)


@pytest.mark.parametrize(
    ("parameter", "kind", "words"),
    [
        ("whole", TEXT, "of type string, .* takes whole: int; cast it to bigint, or read"),
        ("whole", spark.DoubleType(), "of type double, .* takes whole: int; cast it to bigint"),
        ("number", TEXT, "takes number: float; cast it to double"),
        ("number", spark.DecimalType(10, 2), r"decimal\(10,2\), .* cast it to double"),
        ("text", NUMBER, "takes text: str; cast it to string"),
        ("day", TEXT, "takes day: date; cast it to date"),
        ("moment", TEXT, r"takes moment: datetime \| None; cast it to timestamp"),
        ("price", spark.DoubleType(), r"cast it to decimal\(38,18\)"),
        ("ident", TEXT, "annotate what the column holds"),
        ("file", NUMBER, "takes file: Path; cast it to string"),
        ("color", NUMBER, "takes color: Color; cast it to string"),
        ("size", NUMBER, "takes size: one of 'S', 'L'; cast it to string"),
        ("counts", spark.ArrayType(TEXT), r"list\[int\] \(counts\[0\] is a str, not int\)"),
        ("by_name", spark.MapType(TEXT, TEXT), r"by_name\[...\] is a str, not int"),
        ("line", schema(name=TEXT), r"\(line.price is missing\)"),
        ("line", TEXT, "takes line: Line"),
        ("lines", spark.ArrayType(schema(name=NUMBER, price=TEXT)), r"lines\[0\].name is an int"),
        ("pair", spark.ArrayType(NUMBER), r"\(pair\[1\] is an int, not str\)"),
    ],
    ids=lambda each: each if isinstance(each, str) and each in FITS else "",
)
def test_a_column_of_another_type_is_refused_by_name(app, parameter, kind, words):
    columns = ((parameter, "col"),)
    with pytest.raises(ConfigurationError, match=words) as caught:
        matched(wish("shop.typed", columns=columns), schema(id=NUMBER, col=kind), app)
    assert str(caught.value).startswith("column 'col' is of type ")
    assert len(str(caught.value).splitlines()) == 1


def test_swapped_columns_are_found_by_their_types(app):
    swapped = (("path", "width"), ("width", "path"))
    with pytest.raises(ConfigurationError, match=r"column 'width' is of type int, .*path: str"):
        matched(wish(columns=swapped), FILES, app)


def test_any_further_argument_has_the_annotation_of_the_others():
    app = App("shop", broker="local://:memory:")

    @app.task(name="x")
    def further(**counts: int) -> None: ...

    assert matched(wish("x"), schema(id=NUMBER, a=NUMBER), app).nulls == (
        ("id", "int"),
        ("a", "int"),
    )
    with pytest.raises(ConfigurationError, match=r"column 'a' is of type string.*takes a: int"):
        matched(wish("x"), schema(id=NUMBER, a=TEXT), app)


def test_what_becomes_of_a_null(app):
    """It is refused for a, None for b, c and e, and the default of d and f."""
    columns = tuple((name, name) for name in "abcdef")
    made = matched(
        wish("shop.nulls", columns=columns),
        schema(id=NUMBER, **dict.fromkeys("abcdef", NUMBER)),
        app,
    )
    assert made.nulls == (("a", "int"), ("d", ""), ("f", ""))
    assert Submission.from_options(made.as_options()) == made
    never = spark.StructType(
        [spark.StructField(name, NUMBER, nullable=False) for name in ("id", *"abcdef")]
    )
    assert matched(wish("shop.nulls", columns=columns), never, app).nulls == ()
