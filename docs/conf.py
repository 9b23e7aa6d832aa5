"""How Sphinx builds this site: `make docs`. Options, numbers and errors are read from the code while it builds."""

import sys
from pathlib import Path

import lmcache

sys.path.insert(0, str(Path(__file__).parent / "_ext"))

project = "lmcache"
copyright = ""
version = release = lmcache.__version__

extensions = ["myst_parser", "sphinx_design", "sphinx.ext.autodoc", "from_code"]
exclude_patterns = ["_build"]

myst_enable_extensions = ["colon_fence", "deflist", "attrs_inline"]
myst_heading_anchors = 3

# docstrings write code in single backticks, as Markdown does
default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_preserve_defaults = True
autoclass_signature = "separated"
python_maximum_signature_line_length = 100

html_theme = "furo"
html_title = f"lmcache {release}"
html_static_path = ["_static"]
html_css_files = ["lmcache.css"]
html_show_copyright = False
html_show_sphinx = False
html_copy_source = False
html_theme_options = {
    "light_css_variables": {"color-brand-primary": "#0b6e63", "color-brand-content": "#0b6e63"},
    "dark_css_variables": {"color-brand-primary": "#5fd0c0", "color-brand-content": "#5fd0c0"},
}
