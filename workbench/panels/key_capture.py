"""Keyboard input for dropdowns, lists and sliders.

JupyterLab and Notebook handle keys as shortcuts unless the focus is in a text field: on a dropdown, an arrow would select
another cell, and D twice would delete one. Their shortcuts skip elements with Lumino's attribute
`data-lm-suppress-shortcuts`. Notebook handles keys before any element, hence the listener on the window. Classic Notebook
handles keys that reach the document.
"""

from __future__ import annotations

import anywidget

# The element is attached to the page after `render`, hence the wait for a frame. Keys with Ctrl or Cmd, such as Ctrl+S,
# remain shortcuts of the notebook.
_ESM = """
const choices = "select, .noUi-handle, .l2l-layers-box, .l2l-plan-lines";
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
    """Invisible widget that keeps keys on the controls of its workbench, or else of its box."""

    _esm = _ESM
