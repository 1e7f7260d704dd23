"""What a person reads is plain English: pages, docstrings, comments, help, log lines and errors.

The phrases below are idioms of nobody's English; each stands with what to write instead.
"""

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from itertools import zip_longest
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# Phrase (a regular expression, upper and lower case alike) and what to write instead.
PHRASES = {
    r"\bwhoever\b": "name the person or the thing",
    r"\bsomebody\b": "name the person or the thing",
    r"\bsomeone else\b": "name the person or the thing",
    r"\bnobody\b": "no worker, no caller ...",
    r"\banybody\b": "any worker, any caller ...",
    r"\beverybody\b": "all callers ...",
    r"\blooks? whether\b": "check that",
    r"\blooked whether\b": "checked that",
    r"\b(is|are|was|were|be) away\b": "unreachable",
    r"\btold as\b": "reported as",
    r"\btells? of\b": "reports",
    r"\btold of\b": "informed about",
    r"\b(is|are) torn\b": "damaged",
    r"\bsigns? of life\b": "heartbeat",
    r"\bof one that\b": "for a worker that ...",
    r"\bof ones that\b": "for workers that ...",
    r"\bfor ever\b": "forever, without end",
    r"\bwhat is young\b": "recent",
    r"\bare no events\b": "damaged lines",
    r"\bunder an id that repeats\b": "under a deterministic id",
    r"\bstands? with (them|it)\b": "see ...",
    r"\bhas nothing to do\b": "idle",
    r"\bhave nothing to do\b": "idle",
    r"\bis over\b": "expired, ended",
    r"\bare over\b": "expired, ended",
    r"\bas it lies\b": "as it is stored",
    r"\bheard of\b": "reported",
    r"\bit is all the same\b": "it makes no difference",
    r"\bmeanwhile\b": "in the meantime, or say what happened",
    r"\bthe more so\b": "especially",
    r"\bby and by\b": "gradually",
    r"\bin vain\b": "without success",
    r"\blest\b": "so that ... not",
    r"\bhence\b": "therefore, so",
    r"\bthereby\b": "this way",
    r"\bthereof\b": "of it",
    r"\bwherein\b": "in which",
    r"\bnot any more\b": "no longer",
    r"\bany more\b": "no longer",
    r"\bno more than that\b": "only that",
    r"\bput down\b": "recorded",
    r"\bwrites? down\b": "write, save",
    r"\bwritten down\b": "written, saved",
    r"\bis due to be\b": "is scheduled",
    r"\bis left out\b": "is skipped",
    r"\bare left out\b": "are skipped",
    r"\brights\b": "permissions",
}
CODE = re.compile(r"`[^`\n]+`")
SHORT = 4  # A docstring of so few words repeats the name.
AREAS = sorted(
    {path.name for path in (ROOT / "aztask").iterdir() if (path / "__init__.py").exists()}
    | {"docs", "top level", "examples"}
)


def files(area: str) -> list[Path]:
    if area == "docs":
        return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if area == "top level":
        return sorted((ROOT / "aztask").glob("*.py"))
    if area == "examples":
        return sorted(p for p in (ROOT / "examples").rglob("*") if p.suffix in {".py", ".md"})
    return sorted((ROOT / "aztask" / area).rglob("*.py"))


def prose(path: Path) -> Iterator[tuple[int, str]]:
    """The lines that a person reads, with their numbers: strings and comments, or a page's text."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        fenced = False
        for number, line in enumerate(text.splitlines(), 1):
            if line.lstrip().startswith("```"):
                fenced = not fenced
            elif not fenced:
                yield number, CODE.sub("", line)
        return
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in {tokenize.STRING, tokenize.COMMENT}:
            for offset, line in enumerate(token.string.splitlines()):
                yield token.start[0] + offset, CODE.sub("", line)


def phrases(path: Path, root: Path = ROOT) -> Iterator[str]:
    lines = list(prose(path))
    for phrase, instead in PHRASES.items():
        # Two lines together, so that a phrase is found where a line is broken within it.
        pattern = re.compile(phrase.replace(" ", r"\s+(?:# )?"), re.IGNORECASE)
        for (number, line), (_, after) in zip_longest(lines, lines[1:], fillvalue=(0, "")):
            found = pattern.search(f"{line}\n{after.strip()}")
            if found and found.start() < len(line):
                yield f"{path.relative_to(root)}:{number}: {found[0]!r}; write: {instead}"


def short_docstrings(path: Path) -> Iterator[str]:
    kinds = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        if text is not None and len(text.split()) <= SHORT:
            yield f"{path.relative_to(ROOT)}:{node.lineno}: {text!r} repeats the name"


@pytest.mark.parametrize("area", AREAS)
def test_what_people_read_is_plain_english(area: str) -> None:
    found = [line for path in files(area) for line in phrases(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("area", [area for area in AREAS if area != "docs"])
def test_a_docstring_says_something_that_the_name_does_not(area: str) -> None:
    modules = [path for path in files(area) if path.suffix == ".py"]
    found = [line for path in modules for line in short_docstrings(path)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    ("text", "refused"),
    [
        ('"""Whoever asks."""', True),
        ("# the store\n# is away\n", True),
        ("x = 1  # the store is\n# away\n", True),
        ("whoever = 1\n", False),
        ('"""Any worker resends it."""', False),
    ],
)
def test_phrases_are_found_where_a_person_reads_them(
    tmp_path: Path, text: str, refused: bool
) -> None:
    page = tmp_path / "module.py"
    page.write_text(text, encoding="utf-8")
    assert bool(list(phrases(page, tmp_path))) is refused
