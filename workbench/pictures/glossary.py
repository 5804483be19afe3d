"""The words of a relay, each explained in a sentence, and how a word carries its sentence onto the page."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from workbench.pictures.picture import Table

GLOSSARY: Mapping[str, str] = {
    "relay": "training with one layer at a time on the device; the others wait in host memory",
    "EPS": "eager param-server: it keeps all weights and optimizer state on the host, and updates a layer as soon as its "
    "gradient has arrived",
    "shell": "everything of the model that is in no layer, such as embedding and head; it stays on the device",
    "micro-batch": "a slice of the batch; in a relay a layer runs all of them before it gives way to the next layer",
    "visit": "one stay of a layer on the device, in a relay with all micro-batches",
    "load": "a copy of a layer's weights from the host to the device",
    "push": "a copy of a layer's summed gradient from the device to the host",
    "stash": "the inputs of the layers, kept from forward until backward computes the layer again",
    "layers ahead": "how many layers are loaded while another one computes; each takes one more slot on the device",
    "layers that stay": "further layers that the device has room for; the last ones of forward are not loaded again for backward",
    "graphs kept": "how many of the last layers keep what backward needs, and are not computed a second time",
    "depth first": "a schedule in which nothing gives way: a micro-batch runs through all layers and back before the next one "
    "begins; only the first one's forward hides loads, and only the last one's backward hides pushes",
    "hidden": "a copy is hidden while the device computes at the same time; the rest is exposed, and makes the step longer",
    "compute-bound": "the device hardly ever waits: a faster link would not help",
    "link-bound": "the device waits for copies: more rows per visit of a layer, or a faster link, would help",
    "in core": "ordinary training, with the whole model, its gradients and its optimizer state on the device",
    "budget": "the device memory that a step may use; a step that needs more fails and changes nothing",
    "branch": "a line of training beside others, with weights and optimizer state of its own",
    "probe": "a few fixed batches on which the model is evaluated before and after an edit",
    "identity layer": "a layer that passes on what it gets, to the bit, until training changes it",
}


def term_html(word: str, text: str = "") -> str:
    """Write a word as HTML that tells what it means to a pointer, to the keyboard and to screen readers.

    Args:
        word: of the glossary.
        shown: what stands on the page in its place; default the word.

    Raises:
        KeyError: the glossary does not have it.
    """
    # not as a `title`, which browsers show to a resting pointer alone; the style shows `data-means` to the keyboard, too
    means = escape(GLOSSARY[word], quote=True)
    words = escape(text or word)
    return f'<span class="l2l-term" tabindex="0" role="note" aria-label="{words}: {means}" data-means="{means}">{words}</span>'


def glossary_table() -> Table:
    """Make a table of all words and what they mean."""
    return Table("The words of a relay", ("word", "means"), list(GLOSSARY.items()))


STYLE = """
.l2l-term{border-bottom:1px dotted currentColor;cursor:help;position:relative}
.l2l-term:hover::after,.l2l-term:focus::after{content:attr(data-means);position:absolute;left:0;top:1.5em;z-index:20;
width:max-content;max-width:300px;padding:6px 9px;border-radius:4px;white-space:normal;font-weight:400;line-height:1.35;
font-size:12px;color:var(--jp-ui-font-color1,CanvasText);background:var(--jp-layout-color2,Canvas);
border:1px solid var(--jp-border-color1,#888);box-shadow:0 2px 8px #0003}
.l2l-glossary td{text-align:left!important;white-space:normal}
""".replace("\n", "")
