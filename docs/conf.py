"""How Sphinx builds this documentation: ``tox -e docs``."""

from aztask.version import __version__

project = "aztask"
author = "The aztask authors"
release = version = __version__
extensions = ["myst_parser"]
source_suffix = {".md": "markdown"}
exclude_patterns = ["_build"]
html_theme = "alabaster"
html_theme_options = {
    "description": "Background tasks on Azure queues, under leases",
    "page_width": "1080px",
}
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3
