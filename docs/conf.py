"""How Sphinx builds this documentation: ``tox -e docs``."""

import sys
from pathlib import Path

from aztask.version import __version__

sys.path.insert(0, str(Path(__file__).parent))

project = "aztask"
author = "The aztask authors"
release = version = __version__
extensions = ["myst_parser", "sphinx_copybutton", "otherreaders"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
# Furo, and not Shibuya or PyData: its sidebar has every page, so that a reader sees the neighbours
# of the present one; it scrolls wide tables inside the page, works without JavaScript but for the
# search, and brings no fonts or scripts of other hosts, which many companies block.
html_theme = "furo"
html_title = f"aztask {__version__}"
html_search_scorer = str(Path(__file__).parent / "static" / "scorer.js")
html_copy_source = False  # each page is beside its HTML, as Markdown
html_theme_options = {"navigation_with_keys": True}
# A reader who copies a console block wants its commands, without the prompt and what they print.
copybutton_prompt_text = "$ "
copybutton_only_copy_prompt_lines = True
copybutton_line_continuation_character = "\\"
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
