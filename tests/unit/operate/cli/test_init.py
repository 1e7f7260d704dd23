import pytest

from aztask.operate.cli.init import FILES

RULE = "cannot name a project: use lower-case letters, digits and '_'"


def test_it_writes_all_files(cli):
    ended = cli("init", "shop")
    assert (ended.code, ended.out) == (0, "wrote shop: 16 files; read shop/README.md\n")
    folder = cli.folder / "shop"
    found = {str(path.relative_to(folder)) for path in folder.rglob("*.*")}
    assert found == {path.format(name="shop") for path in FILES}
    for path in found:
        text = (folder / path).read_text().replace("$env:AZTASK_", "").replace("$ ", "")
        assert "$" not in text, "each place of a template is filled"


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("my-shop", f"'my-shop' {RULE}; write my_shop"),
        ("My shop", f"'My shop' {RULE}; write my_shop"),
        ("../shop", f"'../shop' {RULE}"),
        ("", f"'' {RULE}"),
        ("1shop", f"'1shop' {RULE}"),
        ("caf\xe9", RULE),
        ("a\x1b[31m", RULE),
        ("json", "'json' is the name of another Python module; write json_tasks"),
        ("class", "'class' is the name of another Python module; write class_tasks"),
        ("aztask", "'aztask' is the name of another Python module; write aztask_tasks"),
        ("tests", "'tests' is the name of another Python module; write tests_tasks"),
        ("x" * 41, "is too long to name a project: use at most 40 characters"),
    ],
)
def test_a_bad_name_is_refused_in_one_line(cli, name, line):
    ended = cli("init", name)
    assert line in ended.error
    assert (ended.code, ended.out) == (2, "")
    assert list(cli.folder.iterdir()) == []


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_an_existing_name_is_left_alone(cli, kind):
    place = cli.folder / "shop"
    {"folder": place.mkdir, "file": place.touch, "link": lambda: place.symlink_to("x")}[kind]()
    ended = cli("init", "shop")
    assert (ended.code, ended.error) == (1, "'shop' exists already; choose another name")
    assert kind != "folder" or list(place.iterdir()) == []


def test_a_write_that_fails_leaves_no_folder(cli, monkeypatch):
    monkeypatch.setitem(FILES, "x" * 300, "app.py")
    ended = cli("init", "shop")
    assert ended.code == 1
    assert "File name too long" in ended.error
    assert list(cli.folder.iterdir()) == []
