"""The documentation as a site: `make site`. Pages are those of this folder; index.md has their order."""

import posixpath
from importlib.metadata import version as version_of
from pathlib import Path

from docutils import nodes

project = "siirl"
copyright = "siirl contributors"
version = release = version_of("siirl")
extensions = ["myst_parser", "sphinx_copybutton"]
exclude_patterns = ["_build"]
root_doc = "index"
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4
html_theme = "furo"
html_title = f"siirl {version}"
html_copy_source = False
html_show_sphinx = False
html_extra_path = sorted(str(picture) for picture in Path(__file__).parent.glob("view_*.png"))
copybutton_prompt_text = "$ "


def name_files_of_the_repository(app, doctree):
    """What lies outside of this folder is no page: a link to it becomes its path."""
    for link in list(doctree.findall(nodes.reference)):
        target = link.get("refuri", "")
        if target.startswith("../"):
            path = posixpath.normpath(target.removeprefix("../"))
            link.replace_self(nodes.literal(text=path))


def setup(app):
    """Sphinx's entry."""
    app.connect("doctree-read", name_files_of_the_repository)
