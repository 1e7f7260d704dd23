"""What the site has for readers other than a browser: an inventory, Markdown and ``llms.txt``.

Rules
1. The inventory (``objects.inv``) has what ``docs/generate/api.py`` writes into the reference,
   under the names that users import. Other projects link to it: ``{class}`aztask.App```.
2. Beside each HTML page is the same page as plain Markdown: no MyST roles or directives, and links
   that lead to other such pages.
3. ``llms.txt`` (https://llmstxt.org) lists these pages, each with its first sentence.
"""

from __future__ import annotations

import importlib
import inspect
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

import aztask

MARK = re.compile(r"<!-- api: (?P<name>[\w.*]+)")
FENCE = re.compile(
    r"^(?P<fence>```+|:::+)(?P<head>[^\n`]*)\n(?P<body>.*?)^(?P=fence)[ ]*\n",
    re.MULTILINE | re.DOTALL,
)
ROLE = re.compile(
    r"\{(?P<role>\w+)\}`(?:(?P<text>[^`<]*?)\s*<(?P<target>[^`>]+)>|(?P<bare>[^`]+))`"
)
LINK = re.compile(r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)")
COMMENT = re.compile(r"<!--.*?-->\n?|^\([\w-]+\)=\n", re.DOTALL | re.MULTILINE)
OPTION = re.compile(r"^:\w+:.*\n?", re.MULTILINE)


# -- the inventory -----------------------------------------------------------------------------


def note_objects(app: Sphinx, doctree: nodes.document) -> None:
    """Give Sphinx the classes, functions and methods of a page, each with its section."""
    domain = app.env.get_domain("py")
    place = ""
    for node in doctree.findall(lambda each: isinstance(each, nodes.raw | nodes.section)):
        if isinstance(node, nodes.raw):
            text = node.astext()
            found = MARK.search(text)
            place = found["name"] if found else "" if "end of api" in text else place
            continue
        title = node[0]
        if not (place and len(title) == 1 and isinstance(title[0], nodes.literal)):
            continue
        name = f"{place.rpartition('.')[0]}.{title.astext()}"
        names = [name]
        if title.astext() in aztask.__all__:  # an error is in `aztask.errors` and in `aztask`
            names.append(f"aztask.{title.astext()}")
        for each in names:
            kind = kind_of(each)
            if kind and each not in domain.objects:  # type: ignore[attr-defined]
                domain.note_object(each, kind, node["ids"][0], location=node)  # type: ignore[attr-defined]


def kind_of(name: str) -> str:
    """What Sphinx calls an object; empty if there is none of this name."""
    module, _, rest = name.rpartition(".")
    try:
        found: Any = getattr(importlib.import_module(module), rest, None)
        method = False
    except ImportError:
        module, _, owner = module.rpartition(".")
        found = getattr(getattr(importlib.import_module(module), owner, None), rest, None)
        method = True
    if inspect.isclass(found):
        return "exception" if issubclass(found, BaseException) else "class"
    return "" if found is None else "method" if method else "function"


# -- Markdown ----------------------------------------------------------------------------------


class Plain:
    """Turns one page into plain Markdown. name: the page, as Sphinx calls it (``how-to/index``)."""

    def __init__(self, env: BuildEnvironment, name: str) -> None:
        self.env = env
        self.name = name
        self.source = Path(env.doc2path(name))

    def text(self) -> str:
        """The whole page."""
        raw = self.source.read_text(encoding="utf-8")
        parts: list[str] = []
        last = 0
        for match in FENCE.finditer(raw):
            parts += [self._prose(raw[last : match.start()]), self._fenced(match)]
            last = match.end()
        parts.append(self._prose(raw[last:]))
        return re.sub(r"\n{3,}", "\n\n", "".join(parts)).strip() + "\n"

    def _prose(self, text: str) -> str:
        return ROLE.sub(self._role, LINK.sub(self._link, COMMENT.sub("", text)))

    def _fenced(self, match: re.Match[str]) -> str:
        directive = re.fullmatch(r"\{(\w+)\} ?(.*)", match["head"].strip())
        if directive is None:
            return match[0]
        kind, argument = directive.groups()
        body = OPTION.sub("", match["body"]).strip()
        if kind == "toctree":
            names = [self._resolved(line) for line in body.splitlines() if line.strip()]
            return "".join(f"* {self._page(name)}\n" for name in names)
        if kind == "literalinclude":
            docs = Path(self.env.srcdir)
            root = docs if argument.startswith("/") else self.source.parent
            path = (root / argument.lstrip("/")).resolve()
            kind = {"py": "python", "yaml": "yaml"}.get(path.suffix[1:], "text")
            return f"```{kind}\n{path.read_text(encoding='utf-8').rstrip()}\n```\n"
        quoted = self._prose(body).replace("\n", "\n> ")
        return f"> **{kind.capitalize()}:** {quoted}\n"

    def _resolved(self, target: str) -> str:
        """A page's name, from how this page writes it."""
        target = target.strip()
        if target.startswith("/"):
            return target[1:]
        return posixpath.normpath(posixpath.join(posixpath.dirname(self.name), target))

    def _relative(self, path: str) -> str:
        return posixpath.relpath(path, posixpath.dirname(self.name) or ".")

    def _page(self, name: str, text: str = "") -> str:
        """A link to a page, with its title or another text."""
        text = text or self.env.titles[name].astext()
        return f"[{' '.join(text.split())}]({self._relative(name)}.md)"

    def _role(self, match: re.Match[str]) -> str:
        target = (match["target"] or match["bare"]).strip()
        if match["role"] == "doc":
            return self._page(self._resolved(target), match["text"] or "")
        if match["role"] == "ref":
            return f"[{match['text']}](#{target})"
        return f"`{target.removeprefix('~')}`"

    def _link(self, match: re.Match[str]) -> str:
        """A link to a page, a picture or elsewhere; to a file that the site lacks, its name."""
        target, _, anchor = match["target"].partition("#")
        if not target or ":" in target:
            return match[0]
        path = self._resolved(target)
        if path.removesuffix(".md") in self.env.all_docs:
            return f"[{match['text']}]({self._relative(path)}{'#' if anchor else ''}{anchor})"
        if path in self.env.images:
            return f"![{match['text']}]({self._relative(f'_images/{self.env.images[path][1]}')})"
        return f"{match['text']} (`{posixpath.normpath(posixpath.join('docs', path))}`)"


def link_markdown(
    app: Sphinx, name: str, template: str, context: dict[str, Any], doctree: nodes.document | None
) -> None:
    """Say at the end of an HTML page, and in its head, where its Markdown is."""
    if doctree is not None and app.builder.format == "html":
        file = f"{posixpath.basename(name)}.md"
        context["metatags"] += f'<link rel="alternate" type="text/markdown" href="{file}">'
        context["body"] += f'<p class="as-markdown"><a href="{file}">This page as Markdown</a></p>'


def write_markdown(app: Sphinx, error: Exception | None) -> None:
    """Write the Markdown of every page, and ``llms.txt``."""
    if error is not None or app.builder.format != "html":
        return
    folder = Path(app.outdir)
    for name in app.env.all_docs:
        path = folder.joinpath(*f"{name}.md".split("/"))
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(Plain(app.env, name).text(), encoding="utf-8")
    (folder / "llms.txt").write_text("\n".join(listed(app.env)) + "\n", encoding="utf-8")


# -- llms.txt ----------------------------------------------------------------------------------


def listed(env: BuildEnvironment) -> Iterator[str]:
    """The lines of ``llms.txt``: single pages first, then a section for each group of pages."""
    root = env.config.root_doc
    yield f"# {env.config.project}\n\n> {first_sentences(env, root)}\n"
    groups = env.toctree_includes[root]
    singles = [name for name in groups if name not in env.toctree_includes]
    yield "## Start here\n"
    yield from (line(env, name) for name in singles)
    for group in groups:
        if group in env.toctree_includes:
            yield f"\n## {env.titles[group].astext()}\n"
            yield from (line(env, name) for name in below(env, group))


def below(env: BuildEnvironment, name: str) -> Iterator[str]:
    """The pages under a page, groups of pages left away, in their order."""
    for each in env.toctree_includes.get(name, []):
        if each not in env.toctree_includes:
            yield each
        yield from below(env, each)


def line(env: BuildEnvironment, name: str) -> str:
    """A page with its first sentence."""
    said = first_sentences(env, name)
    return f"- [{env.titles[name].astext()}]({name}.md){': ' if said else ''}{said}"


def first_sentences(env: BuildEnvironment, name: str) -> str:
    """The first sentence of a page; the whole paragraph of the first page."""
    paragraphs = re.split(r"\n\n+", Plain(env, name).text())
    text = next((each for each in paragraphs if each[0].isalpha() or each[0] in "[`"), "")
    text = " ".join(LINK.sub(r"\g<text>", text).replace("*", "").split())
    if name == env.config.root_doc:
        return text
    return re.split(r"(?<=[.:])\s", text)[0].removesuffix(":")


def setup(app: Sphinx) -> dict[str, Any]:
    """Called by Sphinx."""
    app.connect("doctree-read", note_objects)
    app.connect("html-page-context", link_markdown)
    app.connect("build-finished", write_markdown)
    return {"version": os.fspath(app.config.version), "parallel_read_safe": True}
