"""What is vendored is what its makers published, and the package carries it."""

import hashlib
import tomllib
from importlib.resources import files

STATIC = files("aztask.dashboard").joinpath("static")


def test_vendored_files_have_their_licence_and_hash():
    known = tomllib.loads(STATIC.joinpath("vendored.toml").read_text())
    assert known
    for name, about in known.items():
        data = STATIC.joinpath(name).read_bytes()
        assert hashlib.sha256(data).hexdigest() == about["sha256"], name
        assert STATIC.joinpath(about["licence"]).read_text().strip()
        assert about["source"].startswith("https://registry.npmjs.org/")


def test_no_file_asks_another_host():
    for each in STATIC.iterdir():
        if each.name.startswith("dash."):
            assert "://" not in each.read_text()
