"""The runner of the documentation's code blocks can fail: each way to be wrong is caught."""

import os
import sys

import pytest
from test_code_blocks import Page, blocks_of, commands_of, matches

TEXT = """
# A page

```python
# shop.py
x = 1
```

<!-- not run: needs a hosted namespace -->
```console
$ aztask worker
```

```{note}
prose
```

````text
```python
quoted
```
````
"""


@pytest.fixture
def page(tmp_path):
    made = Page(tmp_path)
    yield made
    made.close()


def test_blocks_are_found_with_their_language_line_and_reason():
    shop, worker, quoted = blocks_of(TEXT)
    assert (shop.line, shop.language, shop.code) == (4, "python", "# shop.py\nx = 1\n")
    assert shop.reason is None
    assert worker.reason == "needs a hosted namespace"
    assert quoted.language == "text"
    assert blocks_of("<!-- not run: -->\n```sh\nx\n```\n")[0].reason is None


def test_commands_and_their_output():
    code = "$ one \\\n  two\nout\nput\n$ three\n$ four # exit 2\n"
    assert list(commands_of(code)) == [
        ("one \\\n  two", "out\nput"),
        ("three", "..."),
        ("four # exit 2", "..."),
    ]
    with pytest.raises(AssertionError, match="begins with a command"):
        list(commands_of("one\n"))


@pytest.mark.parametrize(
    ("shown", "expected", "same"),
    [
        ("a\n", "a", True),
        ("a", "b", False),
        ("took 1.5 s", "took ... s", True),
        ("took 1.5 s\nmore", "took ... s", False),
        ("a\nb\nc", "a\n...\nc", True),
        ("a\nb\nd", "a\n...\nc", False),
        ("a\nc", "a\n...\nc", True),
        ("c", "...\nc", True),
        ("x\ny\nc", "...\nc", True),
        ("c\nx", "...\nc", False),
        ("a", "a\n...", False),
        ("a\nb\nc", "a\n...", True),
        ("", "...", True),
        ("a.c", "a.c", True),
        ("abc", "a.c", False),
    ],
)
def test_output_is_compared(shown, expected, same):
    assert matches(shown, expected) is same


def run(page, text):
    for block in blocks_of(text):
        page.run(block)


def test_a_page_shares_its_files_and_its_environment(page):
    run(page, "```python\n# shop.py\nprice = 5\n```\n```python\nimport shop\nshop.price\n```\n")
    run(page, "```console\n$ export WHO=me; cd /\n$ echo $WHO; ls\nme\nblock_5.py\nshop.py\n```\n")


@pytest.mark.parametrize(
    "text",
    [
        "```python\nraise SystemExit(1)\n```\n",
        "```python\nimport nothing_like_this\n```\n",
        "```console\n$ false\n```\n",
        "```console\n$ echo a\nb\n```\n",
        "```console\n$ true # exit 3\n```\n",
    ],
)
def test_a_block_that_does_not_do_what_it_shows_fails(page, text):
    with pytest.raises(AssertionError):
        run(page, text)


def test_python_is_the_interpreter_with_the_packages_of_the_tests(page):
    run(page, "```console\n$ python -c 'import sys; print(sys.prefix)'\n" + f"{sys.prefix}\n```\n")


def test_an_exit_status_may_be_shown(page):
    run(page, "```console\n$ exit 3 # exit 3\n```\n")


def test_what_runs_in_the_background_is_stopped_with_the_page(page):
    os.mkfifo(page.folder / "pipe")
    run(page, "```console\n$ (echo up; exec sleep 4711) > pipe &\n```\n")
    with (page.folder / "pipe").open() as pipe:
        assert pipe.readline() == "up\n"
        page.close()
        assert pipe.read() == ""  # its end: the last process that held it is gone
