"""Glossary of the workbench: terms, their explanations, and the HTML of a term with its explanation."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from workbench.pictures.picture import Table

GLOSSARY: Mapping[str, str] = {
    "relay": "training with one layer at a time on the device; the others wait in host memory",
    "EPS": "eager param-server: it keeps all weights and optimizer state on the host, and updates a layer as soon as its "
    "gradient has arrived",
    "shell": "the part of the model outside its layers, such as embedding and head; it stays on the device",
    "micro-batch": "a slice of the batch; in a relay each layer runs all of them before the next layer is loaded",
    "visit": "one stay of a layer on the device, in which it runs all micro-batches",
    "load": "a copy of a layer's weights from the host to the device",
    "push": "a copy of a layer's summed gradient from the device to the host",
    "stash": "the inputs of the layers, kept from forward until backward computes the layer again",
    "layers ahead": "how many layers are loaded while another one computes; each takes one more slot on the device",
    "layers that stay": "further layers that fit on the device; the last layers of forward are not loaded again for backward",
    "graphs kept": "how many of the last layers keep their autograd graph, so that backward does not recompute them",
    "depth first": "a schedule in which all layers stay on the device: a micro-batch runs through all layers and back before "
    "the next one begins; only the first one's forward hides loads, and only the last one's backward hides pushes",
    "hidden": "a copy is hidden while the device computes; the rest is exposed, and makes the step longer",
    "compute-bound": "the device hardly ever waits: a faster link would not help",
    "link-bound": "the device waits for copies: more rows per visit of a layer, or a faster link, would help",
    "in core": "ordinary training, with the whole model, its gradients and its optimizer state on the device",
    "budget": "the device memory that a step may use; a step that needs more fails and changes nothing",
    "branch": "a named state of the model, with separate weights and optimizer state",
    "probe": "a few fixed batches on which the model is evaluated before and after an edit",
    "identity layer": "a layer whose output equals its input, to the bit, until training changes it",
}


def term_html(word: str, text: str = "") -> str:
    """Return a term as HTML, with its explanation for pointer, keyboard and screen readers.

    Args:
        word: a term of the glossary.
        text: text on the page; default `word`.

    Raises:
        KeyError: the glossary does not have `word`.
    """
    # Not a `title`, which keyboard users do not see; the style shows `data-means` on focus, too.
    means = escape(GLOSSARY[word], quote=True)
    words = escape(text or word)
    return f'<span class="l2l-term" tabindex="0" role="note" aria-label="{words}: {means}" data-means="{means}">{words}</span>'


def glossary_table() -> Table:
    """Return a table of all terms and their explanations."""
    return Table("The words of a relay", ("word", "means"), list(GLOSSARY.items()))


STYLE = """
.l2l-term{border-bottom:1px dotted currentColor;cursor:help;position:relative}
.l2l-term:hover::after,.l2l-term:focus::after{content:attr(data-means);position:absolute;left:0;top:1.5em;z-index:20;
width:max-content;max-width:300px;padding:6px 9px;border-radius:4px;white-space:normal;font-weight:400;line-height:1.35;
font-size:12px;color:var(--jp-ui-font-color1,CanvasText);background:var(--jp-layout-color2,Canvas);
border:1px solid var(--jp-border-color1,#888);box-shadow:0 2px 8px #0003}
.l2l-glossary td{text-align:left!important;white-space:normal}
""".replace("\n", "")
