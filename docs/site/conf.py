"""Settings of Sphinx for the site; `build.py` stages the sources and starts it."""

import re
from typing import Any

from sphinx.ext.autodoc.preserve_defaults import update_defvalue
from sphinx.util.inspect import signature as signature_of
from sphinx.util.inspect import stringify_signature

import l2l_core

project = "L2L workbench"
release = l2l_core.__version__
html_title = f"{project} {release}"
language = "en"
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
exclude_patterns = ["README.md", "examples/README.md"]  # pages of this folder show parts of them

# Notebooks are stored with their outputs, so that a build needs no kernel and shows the figures that were looked at.
nb_execution_mode = "off"
nb_merge_streams = True
myst_enable_extensions = ["dollarmath"]
myst_heading_anchors = 4  # links to headings, as on GitHub

default_role = "py:obj"  # `name` is a link where the name is in the reference, and code elsewhere
autodoc_default_options = {"members": True}
autodoc_mock_imports = [
    "accelerate",
    "lightning",
    "torchmetrics",
]  # of the extra `integrations`, which the site need not install
autodoc_inherit_docstrings = False
autodoc_member_order = "bysource"
autodoc_preserve_defaults = True
autodoc_type_aliases = {
    name: name
    for name in (
        "Batch",
        "Join",
        "ListEntry",
        "Loss",
        "LossOver",
        "OptimizerFactory",
        "Split",
        "UserObjective",
        "Weight",
    )
}
autodoc_typehints_format = "short"
maximum_signature_line_length = 80
napoleon_numpy_docstring = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
add_module_names = False

html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_search_summary = False  # it reads pages, which browsers refuse to those opened as files
html_show_sphinx = False
html_show_copyright = False


def readable_default(
    _app: Any, _what: str, _name: str, _object: Any, _options: Any, signature: str, result: str
) -> tuple:
    """Write ... for a default without a source form, such as `<factory>`, which Sphinx cannot read."""
    return re.sub(r"(= ?)<[^<>]*>", r"\1...", signature) if signature else signature, result


def own_signature(
    app: Any, what: str, _name: str, value: Any, _options: Any, _signature: str, result: str
) -> tuple[str, str] | None:
    """Return the signature of a class where Sphinx would show the (*args, **kwargs) of a mocked base or of a protocol."""
    if what == "class" and getattr(value, "_is_protocol", False):
        return "", result  # it is not called
    if what == "class" and hasattr(value, "__sphinx_mock__") and "__init__" in vars(value):
        update_defvalue(app, value.__init__, True)  # writes defaults as the source does
        signature = signature_of(value.__init__, bound_method=True)
        return stringify_signature(signature, show_return_annotation=False, unqualified_typehints=True), result
    return None


def setup(app: Any) -> None:
    app.connect("autodoc-process-signature", own_signature, priority=400)
    app.connect("autodoc-process-signature", readable_default)
