"""A button that copies the script of a session, and one that shows it, for where a page may not write to the clipboard.

Only the page itself has a clipboard, and it gives it out only while somebody presses a button: hence a widget with a few
lines of JavaScript. The text is asked for when it is wanted, since every step changes it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import anywidget

# Over plain http, but for localhost, a page has no `navigator.clipboard`: that throws too, and ends in the same `catch`.
# The view is made anew each time the page shows the widget and the model stays, so it takes its listener off when it goes.
_ESM = """
function render({ model, el }) {
  el.classList.add("l2l-script");
  const make = (kind, words, title) => {
    const made = document.createElement(kind);
    made.textContent = words;
    made.title = title;
    return made;
  };
  const copy = make("button", "Copy as script", "Copy a program that does again all that was done here");
  const show = make("button", "▸ The session as a script", "Open or close the text");
  for (const button of [copy, show]) button.className = "jupyter-button widget-button";
  const said = make("span", "", "");
  said.className = "l2l-caption";
  said.setAttribute("role", "status");
  const text = make("textarea", "", "");
  text.readOnly = true;
  text.spellcheck = false;
  text.setAttribute("aria-label", "The session as a script");
  text.addEventListener("keydown", (event) => event.stopPropagation());  // the notebook takes keys from what is read-only
  const open = (is_open) => {
    text.hidden = !is_open;
    show.textContent = `${is_open ? "▾" : "▸"} The session as a script`;
    show.setAttribute("aria-expanded", is_open);
  };
  open(false);
  let waiting = [];
  const take = (message) => {
    text.value = message.script;
    for (const done of waiting) done(message.script);
    waiting = [];
  };
  model.on("msg:custom", take);
  const ask = () => new Promise((done) => {
    waiting.push(done);
    said.textContent = "waits until the kernel is free";
    model.send({});
  });
  show.addEventListener("click", async () => {
    open(text.hidden);
    if (!text.hidden) { await ask(); said.textContent = ""; }
  });
  copy.addEventListener("click", async () => {
    const script = await ask();
    try {
      await navigator.clipboard.writeText(script);
      said.textContent = `copied, ${script.trimEnd().split("\\n").length} lines`;
    } catch {
      open(true);
      text.select();
      said.textContent = "this page may not write to the clipboard: copy the text below";
    }
  });
  el.append(copy, show, said, text);
  return () => model.disabled("msg:custom", take);
}
export default { render };
"""

# The class `widget-button` gives these buttons the look of the others, and a fixed width, which is taken back here.
_CSS = """
.l2l-script{display:flex;flex-flow:row wrap;align-items:center;gap:4px}
.l2l-script button{flex:0 0 auto;width:auto;height:28px;line-height:28px}
.l2l-script textarea{box-sizing:border-box;flex:1 1 100%;min-width:0;height:20em;white-space:pre;
font:12px var(--jp-code-font-family,ui-monospace,monospace);
color:var(--jp-ui-font-color1,CanvasText);background:var(--jp-layout-color1,Canvas);
border:1px solid var(--jp-border-color2,#8886)}
.l2l-script [hidden]{display:none}
"""


class CopyScript(anywidget.AnyWidget):
    """Shows two buttons, and the text once it is open.

    Args:
        script: gives the text as it is now; called when somebody asks.
    """

    _esm = _ESM
    _css = _CSS

    def __init__(self, script: Callable[[], str]) -> None:
        super().__init__()
        self._script = script
        self.on_msg(self._send_script)

    def _send_script(self, _: object, __: object, ___: Sequence[memoryview]) -> None:
        self.send({"script": self._script()})
