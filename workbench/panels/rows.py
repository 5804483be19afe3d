"""Rows of a table of layers, chosen by pointer or with the arrow keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import anywidget

_ESM = """
export default {
  render({ model, el }) {
    let box = null;
    const chosen = "l2l-selected";
    const pick = (row) => {
      box.querySelector("." + chosen)?.classList.remove(chosen);
      row.classList.add(chosen);  // at once: the next key may come before the table does
      model.send({ picked: row.dataset.key });
      row.scrollIntoView({ block: "nearest" });
    };
    const click = (event) => {
      const row = event.target.closest("tr[data-key]");
      if (row) pick(row);
    };
    const press = (event) => {
      const by = { ArrowDown: 1, ArrowUp: -1, Enter: 0 }[event.key];
      if (by === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      event.stopPropagation();  // JupyterLab would go to another cell
      const rows = [...box.querySelectorAll("tr[data-key]")];
      const at = rows.findIndex((row) => row.classList.contains(chosen));
      const row = rows[Math.min(Math.max(at + (at < 0 && by < 1 ? 1 : by), 0), rows.length - 1)];
      if (row && row !== rows[at]) pick(row);
      if (by === 0) box.closest(".l2l-workbench")?.querySelector(".l2l-card-panel select")?.focus();
    };
    const attach = requestAnimationFrame(() => {
      box = el.parentElement.querySelector(".l2l-layers-box");
      box.tabIndex = 0;
      box.ariaLabel = "Layers: arrow keys choose one, Enter goes to its card";
      box.addEventListener("click", click);
      box.addEventListener("keydown", press);
    });
    return () => {
      cancelAnimationFrame(attach);
      box?.removeEventListener("click", click);
      box?.removeEventListener("keydown", press);
    };
  },
};
"""


class PicksRows(anywidget.AnyWidget):
    """Invisible; stands in one box with a table of layers. Its box keeps the focus while the table in it is made anew.

    Args:
        choose: is given the key of the layer whose row was picked.
    """

    _esm = _ESM

    def __init__(self, choose: Callable[[str], None]) -> None:
        super().__init__(layout={"display": "none"})

        def take(_: object, content: Mapping[str, Any], __: object) -> None:
            choose(content["picked"])

        self.on_msg(take)
