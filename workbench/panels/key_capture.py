"""Keys for dropdowns, lists and sliders.

JupyterLab and Notebook take keys for their own, unless a text is being written: on a dropdown the arrows would go to another
cell, and D twice would delete one. What is pressed on a choice must stay there. Their shortcuts leave alone what carries
Lumino's attribute `data-lm-suppress-shortcuts`; Notebook looks before any element does, hence the listener on the window.
Classic Notebook takes keys that reach the document.
"""

from __future__ import annotations

import anywidget

# The element is put on the page only after `render`, and has no workbench around it before: hence the wait for a frame. With
# Ctrl or Cmd a key is not ours, so that shortcuts such as Ctrl+S stay those of the notebook.
_ESM = """
const choices = "select, .noUi-handle, .l2l-layers-box";
const isOurs = (event) => !event.ctrlKey && !event.metaKey;
export default {
  render({ el }) {
    let around = null;
    const mark = (event) => {
      const choice = event.target instanceof Element ? event.target.closest(choices) : null;
      if (choice && around.contains(choice)) choice.toggleAttribute("data-lm-suppress-shortcuts", isOurs(event));
    };
    const keep = (event) => {
      if (event.target instanceof HTMLSelectElement && isOurs(event)) event.stopPropagation();
    };
    const attach = requestAnimationFrame(() => {
      around = el.closest(".l2l-workbench") ?? el.parentElement;
      window.addEventListener("keydown", mark, true);
      around.addEventListener("keydown", keep);
    });
    return () => {
      cancelAnimationFrame(attach);
      window.removeEventListener("keydown", mark, true);
      around?.removeEventListener("keydown", keep);
    };
  },
};
"""


class KeyCapture(anywidget.AnyWidget):
    """Gives choices the keys that are pressed on them: those in its workbench, or else in its box. It is invisible."""

    _esm = _ESM
