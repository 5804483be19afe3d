"""A button that fills the whole screen with a workbench, in large type, for a lecture room; Escape goes back.

Only the page itself may do that, and only while somebody presses a button: hence a widget with a few lines of JavaScript.
"""

from __future__ import annotations

import anywidget

_ESM = """
function render({ model, el }) {
  const button = document.createElement("button");
  button.className = "jupyter-button widget-button l2l-present";
  button.title = "Fill the screen, in large type and high contrast; Escape goes back";
  button.textContent = "Present";
  button.addEventListener("click", () => {
    if (document.fullscreenElement) document.exitFullscreen();
    else el.closest(".l2l-workbench").requestFullscreen();
  });
  el.append(button);
}
export default { render };
"""


class FullScreenButton(anywidget.AnyWidget):
    """Shows the button; where a page does not let itself be filled, it does nothing."""

    _esm = _ESM
