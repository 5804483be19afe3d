"""Keys for dropdowns and lists.

JupyterLab takes keys for its own, unless a text is being written: on a dropdown the arrows would go to another cell, and
D twice would delete one. What is pressed on a choice must stay there.
"""

from __future__ import annotations

import anywidget

_ESM = """
function keep(event) {
  if (event.target instanceof HTMLSelectElement && !event.ctrlKey && !event.metaKey) event.stopPropagation();
}
export default {
  render({ el }) {
    let around = null;
    const attach = requestAnimationFrame(() => {
      around = el.closest(".l2l-workbench") ?? el.parentElement;
      around.addEventListener("keydown", keep);
    });
    return () => { cancelAnimationFrame(attach); around?.removeEventListener("keydown", keep); };
  },
};
"""


class KeepsKeys(anywidget.AnyWidget):
    """Invisible; choices in the workbench that it is in, or else in its box, get the keys that are pressed on them."""

    _esm = _ESM
