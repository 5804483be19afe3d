"""The style sheet of the panels, in the colours of JupyterLab's theme, and the roles and names of their parts."""

from __future__ import annotations

from pathlib import Path

import anywidget
import ipywidgets

from workbench.panels import layer_switches, plan_editor
from workbench.pictures import (
    VERMILION,
    edit_journal,
    edit_preview,
    glossary,
    inside_lens,
    layer_card,
    next_words,
    page_bundle,
    prediction_examples,
    relay_picture,
    stack_table,
    step_verdict,
    strategy_comparison,
)
from workbench.what_if import what_if_picture

# The arrow of a dropdown in a dark theme, in which that of ipywidgets is black on black.
_ARROW = (
    "url(\"data:image/svg+xml,%3Csvg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 18 18'%3E%3Cpath fill='%23ddd' "
    "d='M5.2 5.9 9 9.7l3.8-3.8 1.2 1.2-4.9 5-4.9-5z'/%3E%3C/svg%3E\")"
)

# `@container`: the width of the workbench decides, which can be small in a wide window with other panes.
# `touch-action:none`: a finger drags a layer and does not scroll the page.
_PANELS = """
.l2l-workbench{container:l2l/inline-size;max-width:1240px;padding:2px 14px 2px;overflow:hidden;color:var(--jp-ui-font-color1);
border:1px solid var(--jp-border-color2,#8884);border-radius:6px}
.l2l-workbench .widget-vbox,.l2l-workbench .widget-vbox>*{flex-shrink:0}
.l2l-workbench .widget-html{width:100%;margin:0}
.l2l-workbench .widget-html-content{line-height:1.35}
.l2l-title{display:flex;gap:12px;align-items:center;min-height:32px;font-size:13px;line-height:1.2;font-variant-numeric:tabular-nums}
.l2l-fact{white-space:nowrap}
.l2l-state{border:2px solid;border-radius:12px;padding:1px 12px;font-weight:600;min-width:78px;
text-align:center;white-space:nowrap}
.l2l-progress{display:flex;gap:10px;align-items:center;padding-left:10px;font-size:12px;font-variant-numeric:tabular-nums;
white-space:nowrap}
.l2l-run{flex:0 0 160px;height:8px;border-radius:4px;background:color-mix(in srgb,currentColor 12%,transparent);overflow:hidden}
.l2l-run>div{height:100%}
.l2l-notice{padding:2px 10px;font-size:12px;font-weight:600}
.l2l-queued{opacity:.75;overflow:hidden;text-overflow:ellipsis}
.l2l-buttons,.l2l-settings,.l2l-player{align-items:center;overflow:visible}
.l2l-buttons>*,.l2l-player>*,.l2l-settings>*{flex:0 0 auto}
.l2l-workbench .l2l-buttons>.widget-html{flex:1 1 0;min-width:0;width:auto}
.l2l-buttons .widget-button,.l2l-player .widget-button,.l2l-player .jupyter-button{height:28px;line-height:28px}
.l2l-settings{gap:2px 14px}
.l2l-settings .widget-readout{flex:0 0 auto;min-width:2.2em;width:auto;max-width:none;white-space:nowrap;overflow:visible}
.l2l-settings .l2l-link .widget-readout{min-width:5.2em}
.l2l-settings .widget-toggle-buttons{display:flex;align-items:center;font-size:var(--jp-widgets-font-size)}
.l2l-settings .widget-toggle-buttons .widget-label{margin-right:6px}
.l2l-settings .widget-toggle-button{height:26px;line-height:26px;font-size:12px}
.l2l-workbench button:focus-visible,.l2l-layers-box:focus-visible,
.l2l-workbench .noUi-handle:focus-visible{outline:2px solid var(--jp-brand-color1,#1976d2);
outline-offset:1px}
.l2l-behind>.widget-toggle-button,.l2l-skip{align-self:flex-start}
.l2l-behind .widget-toggle-button{background:none;box-shadow:none;font-size:12px;height:22px;line-height:22px;
padding:0 4px;opacity:.75;color:inherit}
.l2l-behind .widget-toggle-button:hover{opacity:1;box-shadow:none}
.l2l-buttons .widget-checkbox{margin:0 10px;height:28px;line-height:28px}
.l2l-buttons .widget-checkbox label{display:flex;align-items:center;gap:4px}
.l2l-buttons .widget-checkbox input{margin:0}
.l2l-form{gap:18px;overflow:visible}
.l2l-questions{flex:1 1 0;min-width:0;flex-flow:row wrap;gap:4px 12px;align-content:flex-start;overflow:visible;padding-top:4px}
.l2l-questions>*{flex:0 0 auto;margin-left:0}
.l2l-edits .l2l-outlook{min-height:22px}
.l2l-edits .l2l-journal{margin-top:8px}
.l2l-branches{gap:18px;margin-top:6px;border-top:1px solid var(--jp-border-color2,#8884);padding-top:6px;overflow:visible}
.l2l-fork{flex:0 0 auto;overflow:visible}
.l2l-branches>.widget-html{flex:1 1 0;min-width:0;min-height:74px;max-height:198px;overflow:auto}
.l2l-list{flex:0 0 216px;overflow:visible}
.l2l-workbench .l2l-ranks{display:flex;flex-flow:row wrap;gap:4px 18px;overflow:visible}
.l2l-workbench .l2l-rank{flex:1 1 460px;min-width:0;overflow:visible}
.l2l-rank .l2l-halves>div:last-child{display:none}
.l2l-workbench .l2l-rank>.widget-html{width:100%;min-width:0}
.l2l-rank .l2l-failure{overflow-wrap:anywhere}
.l2l-rank .l2l-heading{overflow:hidden;text-overflow:ellipsis;white-space:nowrap}
.l2l-list select{font-size:12px}
.l2l-caption{font-size:12px;opacity:.75}
.l2l-pending{min-height:20px;font-size:12px}
.l2l-card-pending{min-height:12px;font-size:12px}
.l2l-resume{align-items:center;gap:8px;border:1px solid var(--jp-brand-color1,#1976d2);border-left-width:6px;border-radius:4px;
padding:4px 12px;margin-bottom:6px;overflow:visible}
.l2l-workbench .l2l-resume>.widget-html{flex:1 1 0;min-width:0;width:auto}
.l2l-ended{border:1px solid;border-left-width:6px;border-radius:4px;padding:6px 12px;margin-bottom:6px;font-weight:600}
.l2l-workbench :disabled{cursor:not-allowed}
.l2l-failure{border:1px solid;border-color:@RED;border-left-width:6px;border-radius:4px;padding:8px 12px;font-size:13px}
.l2l-failure pre{white-space:pre-wrap;font-size:12px;line-height:1.35;margin:4px 0;max-height:320px;overflow:auto}
.l2l-failure p{margin:4px 0}
.l2l-empty{opacity:.65;font-size:12px;padding:24px 0;text-align:center}
.l2l-card-panel{border-top:1px solid var(--jp-border-color2,#8884);margin-top:3px;padding-top:3px}
.l2l-card-panel .l2l-buttons .widget-button{height:24px;line-height:24px;margin:1px 2px}
.l2l-workbench .l2l-card-charts{gap:4px 24px;flex-flow:row wrap;overflow:visible}
.l2l-workbench .l2l-card-charts>.widget-html{flex:1 1 300px;max-width:520px}
.l2l-workbench .l2l-card-charts>.widget-html:last-child{flex:2 1 600px;max-width:none}
.l2l-workbench .l2l-card-acts{display:grid;grid-template-columns:repeat(auto-fill,minmax(min(480px,100%),1fr))}
.l2l-workbench .l2l-present{width:auto}
.l2l-layers-box{max-height:26em;overflow:auto!important}
.l2l-workbench:has(.l2l-card-open) .l2l-layers-box{max-height:7.3em}
.l2l-viewbar{display:flex;flex-flow:row wrap;align-items:center;gap:6px;
margin:4px 0 6px;border-bottom:1px solid var(--jp-border-color2,#8884);overflow:visible}
.l2l-viewbar>.widget-toggle-buttons{flex:1 1 auto;display:flex;height:auto;width:auto;overflow:visible}
.l2l-viewbar>button,.l2l-viewbar>.widget-toggle-button{flex:0 0 auto;
height:26px;line-height:26px;white-space:nowrap;padding:0 9px}
.l2l-tabs>div{display:flex;flex-wrap:wrap}
.l2l-workbench .l2l-glossary{margin-top:0}
.l2l-tabs .widget-toggle-button{background:none;box-shadow:none;height:28px;line-height:28px;font-size:13.5px;
padding:0 14px;margin:0;color:inherit;border:0;border-bottom:3px solid transparent}
.l2l-tabs .widget-toggle-button.mod-active{font-weight:600;border-bottom-color:var(--jp-brand-color1,#1976d2)}
.l2l-tour{align-items:center;gap:4px;padding:6px 10px;border-radius:4px;overflow:visible;
background:color-mix(in srgb,var(--jp-brand-color1,#1976d2) 12%,transparent)}
.l2l-tour>.widget-html{flex:1 1 0!important;min-width:0}
.l2l-tour>button{flex:0 0 auto}
.l2l-workbench,.l2l-alone{position:relative}
:is(.l2l-workbench,.l2l-alone) .jupyter-button.mod-primary{background:#1565c0;color:#fff}
:is(.l2l-workbench,.l2l-alone) .jupyter-button.mod-success{background:#2e7d32;color:#fff}
:is(.l2l-workbench,.l2l-alone) .jupyter-button.mod-warning{background:#ffb74d;color:#000}
body[data-jp-theme-light=false] :is(.l2l-workbench,.l2l-alone) select:not([size]){background-image:@ARROW}
.l2l-picks [data-key]{cursor:pointer;outline:0}
.l2l-picks svg:has([data-cell]){touch-action:none}
.l2l-picks:focus-visible{outline:2px solid var(--jp-brand-color1,#1976d2);outline-offset:1px}
.l2l-plus{position:absolute;width:20px;height:20px;margin:-10px 0 0 -10px;padding:0;border:0;border-radius:50%;cursor:pointer;
font:600 16px/18px system-ui,sans-serif;color:#fff;background:var(--jp-brand-color1,#1976d2)}
.l2l-dragged{position:absolute;pointer-events:none;padding:2px 8px;border-radius:4px;font:12px monospace;white-space:nowrap;
color:var(--jp-ui-font-color1,CanvasText);background:var(--jp-layout-color2,Canvas);border:1px solid}
.l2l-pointed{outline:2px solid var(--jp-brand-color1,#1976d2);outline-offset:-2px;border-radius:4px}
.l2l-workbench:fullscreen{max-width:none;padding:14px 22px;overflow:auto!important;border:0;border-radius:0;
background:var(--jp-layout-color1,Canvas)}
.l2l-workbench:fullscreen .l2l .dim{fill-opacity:.92}
.l2l-workbench:fullscreen .l2l .ghost{opacity:.42}
.l2l-workbench:fullscreen .l2l-tabs .widget-toggle-button{font-size:20px}
.l2l-workbench:fullscreen .l2l-title{font-size:20px}
.l2l-workbench:fullscreen .l2l-verdict{font-size:17px}
@media (max-height:760px){.l2l-workbench:fullscreen :is(.l2l-title,.l2l-verdict){font-size:16px}}
.l2l-workbench:fullscreen :is(.l2l-glossary,.l2l-in-force){display:none!important}
.l2l-workbench:fullscreen .l2l-term:is(:hover,:focus)::after{font-size:18px}
@container l2l (max-width:899px){.l2l-title{flex-wrap:wrap}
.l2l-tabs .widget-toggle-button{padding:0 10px}
.l2l-layers :is(th,td):is(:nth-child(5),:nth-child(6)):not([colspan]){display:none}
.widget-hbox{flex-flow:row wrap!important}
.l2l-form>*{min-width:0;max-width:100%}}
@container l2l (max-width:599px){.l2l-workbench .l2l-buttons>.widget-html{flex-basis:100%}}
.l2l-layers-box .l2l-layers{max-height:none;overflow:visible}
"""

STYLE = (
    (
        page_bundle.STYLE
        + relay_picture.STYLE
        + step_verdict.STYLE
        + glossary.STYLE
        + stack_table.STYLE
        + layer_card.STYLE
        + prediction_examples.STYLE
        + edit_journal.STYLE
        + edit_preview.STYLE
        + inside_lens.STYLE
        + next_words.STYLE
        + layer_switches.STYLE
        + plan_editor.STYLE
        + what_if_picture.STYLE
        + strategy_comparison.STYLE
        + _PANELS
    )
    .replace("\n", "")
    .replace("@RED", VERMILION)
    .replace("@ARROW", _ARROW)
)


class PageRoles(anywidget.AnyWidget):
    """Invisible widget that gives controls around it the roles, names and values that screen readers read out."""

    _esm = Path(__file__).with_name("page_roles.js").read_text()


def style_sheet() -> ipywidgets.DOMWidget:
    """Return the style sheet and the roles as a widget; they apply although it is not displayed."""
    return ipywidgets.Box([ipywidgets.HTML(f"<style>{STYLE}</style>"), PageRoles()], layout={"display": "none"})
