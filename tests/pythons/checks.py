"""The Pythons that are tried, and what is checked on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Python:
    """A version, and the suite of Debian that has it; "": this machine must have it."""

    version: str
    suite: str = ""


@dataclass(frozen=True)
class Check:
    """Packages to install, then commands that must succeed.

    * `requirements`: for pip; ``{wheel}`` is the package's own wheel.
    * `commands`: their programs are those of the virtual environment. They run in the source tree.
    * `asked`: it runs only if the command line names it.
    """

    name: str
    requirements: tuple[str, ...]
    commands: tuple[tuple[str, ...], ...]
    asked: bool = False


PYTHONS = (
    Python("3.12"),
    Python("3.13", "trixie"),
    Python("3.14", "testing"),
)

ELSEWHERE = (
    "typing",  # mypy and pyright are the same on every Python
    "pictures",  # they are drawn on one Python and compared with what is committed
    "plots",
)

CHECKS = (
    Check(
        "install",
        ("{wheel}",),
        (
            ("python", "-W", "error", "-c", "import aztask"),
            ("aztask", "--version"),
        ),
    ),
    Check("demo", ("{wheel}",), (("aztask", "demo"),)),
    Check(
        "django",  # 6 or later: earlier Pythons have Django 5.2
        ("{wheel}[django,test]", "django>=6", "pytest-timeout>=2.3"),
        (
            (
                *("python", "-m", "pytest", "-q", "-p", "no:cacheprovider"),
                *("tests/unit/djangotasks", "tests/integration/test_django_worker.py"),
            ),
            ("python", "-m", "tests.djangosuite"),
        ),
    ),
    Check(
        "unit",
        (
            "{wheel}[django,identity,migrate,reload,schedules,tables,tls,test]",
            *("celery>=5.5", "pytest-timeout>=2.3", "pytest-xdist>=3.6", "pyyaml>=6"),
        ),
        (
            (
                *("python", "-m", "pytest", "-q", "-n", "2", "-p", "no:cacheprovider"),
                "tests/unit",
                *("--hypothesis-profile=ci", "--timeout=300"),
                *(f"--ignore=tests/unit/test_{name}.py" for name in ELSEWHERE),
            ),
        ),
        asked=True,
    ),
)
