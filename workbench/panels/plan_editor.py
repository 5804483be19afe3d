"""The lines of a plan, whose actions are selected, moved and written by pointer or keyboard, beside its picture."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from workbench.pictures import kind_colour
from workbench.plans import PlanLine

STYLE = """
.l2l-plan{position:relative;display:grid;gap:4px 18px;grid-template:"text lanes" auto "text figures" 1fr/minmax(0,1fr) 660px}
.l2l-plan-text{grid-area:text;min-width:0}
.l2l-plan-lanes{grid-area:lanes;min-width:0}
.l2l-plan-figures{grid-area:figures;min-width:0}
.l2l-plan-lines{max-height:268px;overflow-y:auto;padding:4px 6px;border-radius:4px;border:1px solid var(--jp-border-color2,#8884);
font:12px/1.3 var(--jp-code-font-family,ui-monospace,monospace);user-select:none}
.l2l-plan-lines:focus-visible{outline:2px solid var(--jp-brand-color1,#1976d2);outline-offset:1px}
.l2l-plan-line{display:flex;padding:2px 0}
.l2l-plan-words{flex:1 1 0;min-width:0;display:flex;flex-flow:row wrap;align-items:center;gap:2px 3px}
.l2l-plan-head{flex:0 0 74px;white-space:nowrap;overflow:hidden;text-overflow:ellipsis;padding-top:3px}
.l2l-plan-head b{display:inline-block;min-width:22px}
.l2l-plan-word{padding:1px 5px;border:1px solid var(--jp-border-color2,#8888);border-bottom:3px solid;border-radius:4px;
cursor:grab;touch-action:none;background:var(--jp-layout-color1,Canvas)}
.l2l-plan-word[aria-selected=true]{outline:2px solid var(--jp-brand-color1,#1976d2);outline-offset:0;font-weight:700;
background:color-mix(in srgb,var(--jp-brand-color1,#1976d2) 18%,transparent)}
.l2l-plan-bar{padding:0 3px;font-weight:700;opacity:.7}
.l2l-plan-end{margin-left:-3px;min-height:20px;border-radius:4px}
.l2l-plan-end:is(.l2l-plan-wrong,.l2l-plan-drop){margin-left:3px;padding:0 3px}
.l2l-plan .l2l-plan-wrong{border-color:@RED;outline:2px dashed @RED;outline-offset:1px;opacity:1}
.l2l-plan .l2l-plan-drop{box-shadow:-4px 0 var(--jp-brand-color1,#1976d2)}
.l2l-plan-input{font:inherit;padding:1px 4px;color:inherit;background:var(--jp-layout-color0,Field);border:1px solid;
border-radius:4px}
.l2l-plan-about{min-height:18px;margin-top:4px;font-size:12px;line-height:1.4}
.l2l-plan-message .l2l-failure{margin-top:6px;padding:4px 10px}
.l2l-plan-stale{opacity:.35;filter:grayscale(1)}
.l2l-plan-lanes svg{cursor:pointer}
.l2l-plan-mark rect{fill:none;stroke:var(--jp-brand-color1,#1976d2);stroke-width:2.5px;pointer-events:none}
.l2l-plan-figures .l2l-table{margin:0}
.l2l-plan-figures th[scope=row]{white-space:nowrap}
.l2l-plan-figures th[scope=col]{white-space:normal;max-width:76px;vertical-align:bottom;line-height:1.25}
.l2l-plan-figures p{font-size:12px;line-height:1.35;opacity:.75;margin:2px 0;max-width:80ch}
@container l2l (min-width:1140px){.l2l-plan-lines{max-height:350px}}
@media (max-height:760px){.l2l-plan-lines{max-height:204px}}
@container l2l (max-width:1139px){.l2l-plan{grid-template:"text figures" auto "lanes lanes" auto/minmax(0,1fr) auto}
.l2l-plan-lanes{max-width:780px}.l2l-plan-figures p{max-width:380px}}
@container l2l (max-width:799px){.l2l-plan{grid-template:"text" auto "lanes" auto "figures" auto/minmax(0,1fr)}}
.l2l-plan-as-text textarea{font-family:var(--jp-code-font-family,ui-monospace,monospace);font-size:12px}
"""

# by the letter of an action: the kind of its events, which have the same colour in the lanes, and its meaning
_KINDS: Mapping[str, tuple[str, str]] = {
    "A": ("gather", "announce loads"),
    "L": ("load", "load a layer's weights into a slot"),
    "I": ("shell", "start a micro-batch: the code before the first layer"),
    "W": ("fetch", "wait for the tensors of a turn"),
    "G": ("fetch", "fetch the tensors of a later turn"),
    "H": ("fetch", "announce later turns"),
    "F": ("forward", "forward of a micro-batch"),
    "X": ("loss", "loss"),
    "B": ("backward", "backward of a micro-batch"),
    "D": ("shell", "drop a graph"),
    "S": ("stash", "end of a turn: offload its tensors"),
    "P": ("push", "push the gradient"),
    "U": ("update", "reduce the gradient and update the layer"),
    "T": ("shell", "backward begins"),
}


class PlanEditor(anywidget.AnyWidget):
    """Shows a plan, its picture and figures; the user's changes are passed on.

    Args:
        on_message: called with a change that the user wishes; see `plan_editor.js`.
        on_select: called with the position of the action that the user selects.

    Attributes:
        lines: of each line: number, layer, position of its end, of its last action, and its words with their positions.
        version: number of changes of the plan; a message has that of the plan that the user saw.
        selected, wrong: position of an action, or -1.
        about: the selected action in words, as HTML.
        message: the rule that the plan breaks, as HTML.
        picture, figures: of the simulated step, as SVG and HTML.
        spans: places of the events in the picture, by action.
        is_stale: picture and figures are of an earlier plan.
        colours, tips: colour and meaning of an action, by its letter.
    """

    _esm = Path(__file__).with_name("plan_editor.js").read_text()
    lines = traitlets.List().tag(sync=True)
    version = traitlets.Int(0).tag(sync=True)
    selected = traitlets.Int(-1).tag(sync=True)
    wrong = traitlets.Int(-1).tag(sync=True)
    about = traitlets.Unicode().tag(sync=True)
    message = traitlets.Unicode().tag(sync=True)
    picture = traitlets.Unicode().tag(sync=True)
    figures = traitlets.Unicode().tag(sync=True)
    spans = traitlets.List().tag(sync=True)
    is_stale = traitlets.Bool(False).tag(sync=True)
    colours = traitlets.Dict({letter: kind_colour(kind) for letter, (kind, _) in _KINDS.items()}).tag(sync=True)
    tips = traitlets.Dict({letter: meaning for letter, (_, meaning) in _KINDS.items()}).tag(sync=True)

    def __init__(self, on_message: Callable[[Mapping[str, Any]], None], on_select: Callable[[int], None]) -> None:
        super().__init__()
        self._on_message = on_message
        self.observe(lambda change: on_select(change["new"]), "selected")
        self.on_msg(lambda _, content, __: self._on_message(content))

    def set_lines(self, lines: Sequence[PlanLine]) -> None:
        """Show the lines of a changed plan."""
        self.lines = [[line.number, line.layer, line.end, line.last, line.words] for line in lines]
        self.version += 1

    def open_input(self, adds: bool) -> None:
        """Open the selected action for writing, or an empty one after it."""
        self.send({"add" if adds else "edit": True})
