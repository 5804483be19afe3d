"""Buttons that copy a program to the clipboard and show it.

A page can write to the clipboard only while it handles a click, hence the JavaScript. The page requests the program on
each click, since every step of a session changes it.
"""

from __future__ import annotations

from collections.abc import Callable

import anywidget
import traitlets

# Over plain http, except on localhost, `navigator.clipboard` is missing, which ends in the same `catch`.
# The page renders the widget again each time it shows it, with the same model, so a view removes its listener.
_ESM = """
function render({ model, el }) {
  el.classList.add("l2l-script");
  const make = (kind, words, title) => {
    const made = document.createElement(kind);
    made.textContent = words;
    made.title = title;
    return made;
  };
  const copy = make("button", model.get("label"), model.get("tip"));
  const show = make("button", "", "Open or close the text");
  const arrow = make("i", "", "");
  show.append(arrow, ` ${model.get("title")}`);
  for (const button of [copy, show]) button.className = "jupyter-button widget-button";
  const status = make("span", "", "");
  status.className = "l2l-caption";
  status.setAttribute("role", "status");
  const text = make("textarea", "", "");
  text.readOnly = true;
  text.spellcheck = false;
  text.setAttribute("aria-label", model.get("title"));
  text.addEventListener("keydown", (event) => event.stopPropagation());  // the notebook handles keys in read-only elements
  const open = (is_open) => {
    text.hidden = !is_open;
    arrow.className = `fa fa-caret-${is_open ? "down" : "right"}`;
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
  const request = () => new Promise((done) => {
    waiting.push(done);
    status.textContent = "waiting for the kernel";
    model.send({});
  });
  show.addEventListener("click", async () => {
    open(text.hidden);
    if (!text.hidden) { await request(); status.textContent = ""; }
  });
  copy.addEventListener("click", async () => {
    const script = await request();
    try {
      await navigator.clipboard.writeText(script);
      const open_ones = [...script.matchAll(/(\\w+)\\(\\) is not written yet/g)].map((found) => found[1] + "()");
      const fill = open_ones.length ? `; fill in ${open_ones.join(" and ")} before it runs` : "; it runs as it is";
      const packages = [...script.matchAll(/# pip install (\\w+)/g)].map((found) => found[1]);
      const needs = packages.length ? `; it needs ${packages.join(" and ")}` : fill;
      status.textContent = `copied, ${script.trimEnd().split("\\n").length} lines${needs}`;
    } catch {
      open(true);
      text.select();
      status.textContent = "the browser refused access to the clipboard: copy the text below";
    }
  });
  el.append(copy, show, status, text);
  return () => model.off("msg:custom", take);
}
export default { render };
"""

# The class `widget-button` sets the style of other buttons, and a fixed width that is reset here.
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
    """Two buttons, and the text of the program when it is open.

    Args:
        script: returns the current program.
        label, tip: of the button that copies.
        title: of the text.
    """

    _esm = _ESM
    _css = _CSS
    label = traitlets.Unicode().tag(sync=True)
    tip = traitlets.Unicode().tag(sync=True)
    title = traitlets.Unicode().tag(sync=True)

    def __init__(
        self,
        script: Callable[[], str],
        label: str = "Copy as script",
        tip: str = "Copy a program that repeats this session",
        title: str = "The session as a script",
    ) -> None:
        super().__init__(label=label, tip=tip, title=title)
        self._script = script
        self.on_msg(self._send_script)

    def update(self) -> None:
        """Show the current program, if the text is open."""
        self._send_script()

    def _send_script(self, *_: object) -> None:
        self.send({"script": self._script()})
