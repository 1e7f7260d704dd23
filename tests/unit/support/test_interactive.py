"""What a notebook declares again is replaced; in a program it is refused."""

import subprocess
import sys

OPTIONS = {"capture_output": True, "text": True, "timeout": 60}
CELL = """
@app.task(queue="images")
def resize(path): return {0}
@app.handler(queue="orders")
def on_order(order): return {0}
app.limit("api", rate="{0}/s")
app.schedule("nightly", resize.s("a"), every={0})
"""
APP = "from aztask import App; app = App('shop', broker='local://:memory:')"
OTHER = "def other(path): return 3\napp.task(name='shop.resize')(other)"
LINES = (
    APP,
    f"exec({CELL.format(1)!r})",
    f"exec({CELL.format(2)!r})",
    "print(app.tasks['shop.resize']('a'), app.tasks['shop.on_order'].function('a'))",
    "print(app.limits['api'].rate.count, *app.schedules.declared)",
    f"exec({OTHER!r})",
)


def test_a_cell_that_is_run_twice_replaces_what_it_declares():
    """At a prompt; a notebook declares in the same way."""
    lines = "\n".join(LINES) + "\n"
    ended = subprocess.run([sys.executable, "-i", "-q"], input=lines, check=False, **OPTIONS)
    assert ended.stdout.splitlines() == ["2 2", "2 shop.nightly"], ended
    assert "DuplicateTask: two functions are registered as 'shop.resize'" in ended.stderr


def test_a_program_with_two_functions_of_one_name_is_refused(tmp_path):
    (tmp_path / "program.py").write_text("\n".join(LINES))
    ended = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, check=False, **OPTIONS)
    assert ended.stdout == ""
    assert "DuplicateTask: two functions are registered as 'shop.resize'" in ended.stderr
