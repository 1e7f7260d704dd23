"""What `aztask migrate rewrite` rewrites, and where it leaves a comment."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import libcst as cst
import pytest

from aztask.celery.migration import rewrite
from aztask.celery.migration.rewrite import rewrite_project

HEAD = "from celery import Celery\n\ncelery_app = Celery('shop')\n\n"
NEW = "from aztask import App{}\n\ncelery_app = App('shop')\n\n"


def after(folder: Path, source: str) -> str:
    (folder / "shop.py").write_text(textwrap.dedent(source))
    found, unread = rewrite_project(folder)
    assert not unread
    (one,) = found
    return one.after


TASK = "@celery_app.task\ndef f(a=0, b=0): ...\n\n"

REWRITTEN = [
    ("@celery_app.task(name='f', acks_late=True)\ndef f(): ...\n",
     "@celery_app.task(name='f')\ndef f(): ...\n"),
    ("@celery_app.task(acks_late=True)\ndef f(): ...\n", "@celery_app.task\ndef f(): ...\n"),
    ("@celery_app.task(bind=True)\ndef f(self):\n    return self.request.id\n",
     "@celery_app.task_with_context\ndef f(self):\n    return self.task_id\n"),
    (TASK + "f.apply_async((1, 2), queue='q', countdown=5)\n",
     TASK + "f.with_options(queue='q', delay=5).delay(1, 2)\n"),
    (TASK + "f.apply_async(args=[1], kwargs={'b': 2})\n", TASK + "f.delay(1, b=2)\n"),
    (TASK + "x = (1,)\nf.apply_async(x, dict(b=2))\n",
     TASK + "x = (1,)\nf.delay(*x, **dict(b=2))\n"),
    (TASK + "f.apply_async(countdown=5, eta=None)\n", TASK + "f.with_options(delay=5).delay()\n"),
    (TASK + "f.apply_async((1,), None, countdown=None, queue=None, expires=60)\n",
     TASK + "f.with_options(expires=60).delay(1)\n"),
    (TASK + "f.apply_async((1,), {}, 'one')\n", TASK + "f.with_options(task_id='one').delay(1)\n"),
    (TASK + "f.apply_async(x for x in (1, 2))\n", TASK + "f.delay(*(x for x in (1, 2)))\n"),
    (TASK + "f.apply_async(kwargs={'class': 1, 'a': 2})\n",
     TASK + "f.delay(**{'class': 1, 'a': 2})\n"),
    (TASK + "f.apply_async(kwargs={'a': 1, 'a': 2})\n", TASK + "f.delay(**{'a': 1, 'a': 2})\n"),
    ("@celery_app.task(name=None, time_limit=None)\ndef f(): ...\n",
     "@celery_app.task\ndef f(): ...\n"),
    ("celery_app.Celery = dict(Celery=Celery('a'), b=[Celery])\n",
     "celery_app.Celery = dict(Celery=App('a'), b=[App])\n"),
    ("@celery_app.task(bind=True)\ndef f(self):\n    return [self.request.id for _ in 'ab']\n",
     "@celery_app.task_with_context\ndef f(self):\n    return [self.task_id for _ in 'ab']\n"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), REWRITTEN)
def test_what_means_the_same_is_rewritten(tmp_path: Path, old: str, new: str) -> None:
    assert after(tmp_path, HEAD + old) == NEW.format("") + new


def test_retries_become_a_policy(tmp_path: Path) -> None:
    text = after(
        tmp_path,
        HEAD + "@celery_app.task(autoretry_for=(OSError,), max_retries=5, retry_backoff=True)\n"
        "def f(): ...\n",
    )
    policy = "RetryPolicy(retry_on=(OSError,), max_retries=5, delay=1)"
    assert text == NEW.format(", RetryPolicy") + f"@celery_app.task(retry={policy})\ndef f(): ...\n"


def test_a_retry_is_raised(tmp_path: Path) -> None:
    text = after(
        tmp_path,
        HEAD + "@celery_app.task(bind=True)\ndef f(self):\n    raise self.retry(countdown=30)\n",
    )
    assert "    raise Retry(delay=30)\n" in text and "from aztask import App, Retry\n" in text


def test_a_logger_is_pythons(tmp_path: Path) -> None:
    text = after(
        tmp_path,
        '"""Tasks."""\n\nfrom __future__ import annotations\n\n'
        "from celery.utils.log import get_task_logger\n\nlog = get_task_logger(__name__)\n",
    )
    assert text.startswith('"""Tasks."""\n\nfrom __future__ import annotations\nimport logging\n')
    assert "log = logging.getLogger(__name__)\n" in text and "celery" not in text


COMMENTED = [
    ("@celery_app.task(throws=(OSError,))\ndef f(): ...\n", "throws", "@celery_app.task(throws"),
    (TASK + "f.apply_async((1,), priority=3)\n", "priority", "f.apply_async((1,), priority=3)"),
    ("celery_app.conf.update(task_annotations={})\n", "task_annotations", "celery_app.conf.update"),
    ("from celery import shared_task\n", "celery.shared_task", "from celery import shared_task"),
    ("from kombu.nowhere import x\n", "kombu.nowhere.x", "from kombu.nowhere import x"),
    ("@celery_app.task(bind=True)\ndef f(self):\n    raise self.retry(exc=OSError())\n",
     "retry", "    raise self.retry(exc=OSError())"),
    ("@celery_app.task(bind=True)\ndef f(self):\n    self.retry(countdown=3)\n",
     "retry", "    self.retry(countdown=3)"),
    ("B = True\n@celery_app.task(bind=B)\ndef f(self):\n    raise self.retry()\n",
     "bind", "@celery_app.task(bind=B)"),
    ("from celery import shared_task\n@shared_task(bind=True)\ndef f(self):\n"
     "    raise self.retry()\n", "retry", "    raise self.retry()"),
    ("from celery import shared_task\n@shared_task(bind=True)\ndef f(self):\n"
     "    return self.request.id\n", "id", "    return self.request.id"),
    (TASK + "f.apply_async(countdown=5, eta=time())\n", "apply_async", "f.apply_async(countdown=5"),
    ("class Retry(Exception): ...\n@celery_app.task(bind=True)\ndef f(self):\n"
     "    raise self.retry()\n", "retry", "    raise self.retry()"),
    ("RetryPolicy = 1\n@celery_app.task(autoretry_for=(OSError,), retry_backoff=True)\n"
     "def f(): ...\n", "autoretry_for", "@celery_app.task(autoretry_for"),
    ("@celery_app.task(autoretry_for=(OSError,), max_retries=None)\ndef f(): ...\n",
     "max_retries", "@celery_app.task(autoretry_for"),
    ("from celery.utils.log import get_task_logger\nlogging = get_task_logger(__name__)\n",
     "celery.utils.log.get_task_logger", "logging = get_task_logger"),
    ("import celery\nx = celery.chain()\n", "celery.chain", "x = celery.chain()"),
]  # fmt: skip


@pytest.mark.parametrize(("source", "name", "line"), COMMENTED)
def test_what_a_person_must_decide_gets_a_comment(
    tmp_path: Path, source: str, name: str, line: str
) -> None:
    lines = after(tmp_path, HEAD + source).splitlines()
    at = next(number for number, text in enumerate(lines) if text.startswith(line))
    above = [each.strip() for each in lines[:at] if each.strip().startswith("# aztask: ")]
    assert any(each.startswith(f"# aztask: {name}: ") for each in above)


@pytest.mark.parametrize("source", [old for old, *_ in REWRITTEN] + [old for old, *_ in COMMENTED])
def test_a_second_run_changes_nothing(tmp_path: Path, source: str) -> None:
    once = after(tmp_path, HEAD + source)
    compile(once, "shop.py", "exec")
    (tmp_path / "shop.py").write_text(once)
    assert [each for each in rewrite_project(tmp_path)[0] if each.before != each.after] == []


OTHERS = [
    "class App: ...\nx = Celery('x')\n",
    "def make(App):\n    return Celery('x')\n",
    "try:\n    import other as App\nexcept ImportError as error:\n    x = Celery('x')\n",
    "Celery = None\nx = Celery\n",
]


@pytest.mark.parametrize("source", OTHERS)
def test_a_name_that_the_module_uses_for_something_else_is_not_taken(
    tmp_path: Path, source: str
) -> None:
    text = after(tmp_path, "from celery import Celery\n" + source)
    assert "from aztask" not in text and "from celery import Celery\n" in text
    assert "# aztask: celery.Celery: " in text


def test_a_name_that_is_imported_with_others_is_taken_out_wherever_it_is_used(
    tmp_path: Path,
) -> None:
    source = "from celery import Celery, shared_task, chain\nx = Celery(1); y = Celery(2)\n"
    text = after(tmp_path, source)
    assert text.startswith("from aztask import App, chain\n")
    assert "from celery import shared_task\nx = App(1); y = App(2)\n" in text


def test_a_maker_of_loggers_is_pythons_also_as_a_value(tmp_path: Path) -> None:
    source = "from celery.utils.log import get_task_logger\nmake = get_task_logger\n"
    assert after(tmp_path, source) == "import logging\nmake = logging.getLogger\n"


def test_what_would_not_be_python_is_left_alone_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def spread(given: cst.Arg) -> Iterator[cst.Arg]:
        yield cst.Arg(given.value, star="*")

    monkeypatch.setattr(rewrite, "_spread", spread)
    file = tmp_path / "shop.py"
    file.write_text(HEAD + TASK + "f.apply_async(x for x in (1, 2))\n")
    found, (left,) = rewrite_project(tmp_path)
    assert (found, left.file) == ([], str(file))
    assert left.reason.startswith("it would no longer be Python (")


def test_what_is_only_likely_is_left_alone(tmp_path: Path) -> None:
    source = "from elsewhere import app\n\n@app.task(acks_late=True)\ndef f(): ...\n"
    assert "@app.task(acks_late=True)" in after(tmp_path, source)
