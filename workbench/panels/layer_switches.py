"""A row of buttons, one per layer, that pull layers out of a look and put them back."""

from __future__ import annotations

import anywidget
import traitlets

_ESM = """
function render({ model, el }) {
  const press = (key) => {
    const out = model.get("left_out");
    model.set("left_out", out.includes(key) ? out.filter((one) => one !== key) : [...out, key]);
    model.save_changes();
  };
  const mark = () => {
    const out = model.get("left_out");
    for (const button of el.querySelectorAll("button")) {
      button.ariaPressed = String(out.includes(button.dataset.layer));
      button.disabled = model.get("disabled");
    }
  };
  const draw = () => {
    const buttons = model.get("layers").map(([name, key, tip]) => {
      const button = document.createElement("button");
      button.className = "jupyter-button widget-button";
      button.dataset.layer = key;
      button.textContent = name;
      button.title = button.ariaLabel = `Pull out layer ${tip}`;
      button.addEventListener("click", () => press(key));
      return button;
    });
    el.replaceChildren(...buttons);
    mark();
  };
  el.classList.add("l2l-switches");
  el.role = "group";
  el.ariaLabel = "Layers that are pulled out while pressed";
  model.on("change:layers", draw);
  model.on("change:left_out", mark);
  model.on("change:disabled", mark);
  draw();
  return () => {
    model.off("change:layers", draw);
    model.off("change:left_out", mark);
    model.off("change:disabled", mark);
  };
}
export default { render };
"""

STYLE = """
.l2l-switches{display:flex;flex-wrap:wrap;gap:3px;max-height:92px;overflow:auto;padding:2px}
.l2l-workbench .l2l-switches button{width:auto;min-width:30px;height:26px;line-height:26px;padding:0 6px;margin:0}
.l2l-workbench .l2l-switches button[aria-pressed=true]{text-decoration:line-through;opacity:.8;box-shadow:none;
background:repeating-linear-gradient(45deg,transparent 0 4px,color-mix(in srgb,currentColor 22%,transparent) 4px 6px)}
""".replace("\n", "")


class LayerSwitches(anywidget.AnyWidget):
    """Buttons of layers; several can be pressed. One widget, since a model may have a thousand layers.

    Attributes:
        layers: short name, key and full name of each layer, in order.
        left_out: keys of the pressed ones.
        disabled: the session has ended.
    """

    _esm = _ESM
    layers = traitlets.List().tag(sync=True)
    left_out = traitlets.List().tag(sync=True)
    disabled = traitlets.Bool(False).tag(sync=True)
