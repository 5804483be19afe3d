// ipywidgets offers no traits for roles and names, so they are set on the page: sliders, lists and buttons with an icon alone get
// a name, sliders a value with its unit, and the buttons of the views are tabs, of which Tab reaches one and the arrows the others.
const NUMBER = /^[-+]?[\d.,]+$/;

const set = (part, name, value) => {
  if (part.getAttribute(name) !== value) part.setAttribute(name, value); // no endless loop: setting an equal value is a change
};

function nameSliders(root) {
  for (const handle of root.querySelectorAll(".noUi-handle")) {
    const box = handle.closest(".widget-hslider");
    if (!box) continue;
    const label = box.querySelector(".widget-label")?.textContent.trim() || box.title || "value";
    const readout = box.querySelector(".widget-readout");
    const shown = readout?.checkVisibility() ? readout.textContent.trim() : String(Math.round(handle.ariaValueNow));
    set(handle, "aria-label", label);
    set(handle, "aria-valuetext", NUMBER.test(shown) ? `${label}: ${shown}` : shown);
  }
}

function nameControls(root) {
  for (const select of root.querySelectorAll("select")) {
    if (!select.labels.length || !select.labels[0].textContent.trim()) {
      set(select, "aria-label", select.title || "list");
    }
  }
  for (const button of root.querySelectorAll("button")) {
    const icon = button.querySelector("i");
    if (!button.textContent.trim() && !button.ariaLabel && icon)
      set(button, "aria-label", button.title || icon.className.replace(/^.*fa-/, ""));
  }
  for (const picture of root.querySelectorAll(".l2l-picks")) set(picture, "role", "group");
  for (const toggle of root.querySelectorAll(".widget-toggle-button:not([role=tab])")) {
    const state = toggle.closest(".l2l-behind") ? "aria-expanded" : "aria-pressed";
    set(toggle, state, String(toggle.classList.contains("mod-active")));
  }
}

function nameTabs(root, name) {
  const list = root.querySelector(".l2l-tabs > div:has(button)"), views = root.querySelector(".l2l-views");
  if (!list || !views) return;
  set(list, "role", "tablist");
  set(list, "aria-label", "Views of the workbench");
  const panels = [...views.children];
  [...list.querySelectorAll("button")].forEach((tab, i) => {
    const isActive = tab.classList.contains("mod-active");
    set(tab, "role", "tab");
    set(tab, "id", `${name}-tab-${i}`);
    set(tab, "aria-selected", String(isActive));
    set(tab, "aria-controls", `${name}-view-${i}`);
    set(tab, "tabindex", isActive ? "0" : "-1");
    tab.removeAttribute("aria-pressed");
    if (!panels[i]) return;
    set(panels[i], "role", "tabpanel");
    set(panels[i], "id", `${name}-view-${i}`);
    set(panels[i], "aria-labelledby", `${name}-tab-${i}`);
  });
}

function turn(event) {
  const tab = event.target.closest?.('.l2l-tabs [role="tab"]');
  if (!tab || event.ctrlKey || event.metaKey || event.altKey) return;
  const tabs = [...tab.parentElement.querySelectorAll('[role="tab"]')], at = tabs.indexOf(tab);
  const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: tabs.length - 1 }[event.key];
  if (next === undefined) return;
  event.preventDefault();
  event.stopPropagation(); // JupyterLab would select another cell
  const chosen = tabs[(next + tabs.length) % tabs.length];
  chosen.click();
  chosen.focus();
}

export default {
  render({ el }) {
    const name = `l2l-${Math.random().toString(36).slice(2)}`;
    let root = null, waits = 0;
    const draw = () => {
      waits = 0;
      nameSliders(root);
      nameControls(root);
      nameTabs(root, name);
    };
    // pictures are redrawn many times per second: once per frame is enough
    const observer = new MutationObserver(() => (waits ||= requestAnimationFrame(draw)));
    const attach = requestAnimationFrame(() => {
      root = el.closest(".l2l-workbench") ?? el.parentElement.parentElement;
      root.addEventListener("keydown", turn, true);
      const attributeFilter = ["class", "style", "aria-valuetext", "aria-valuenow", "title"];
      observer.observe(root, { subtree: true, childList: true, characterData: true, attributes: true, attributeFilter });
      draw();
    });
    return () => {
      cancelAnimationFrame(attach);
      cancelAnimationFrame(waits);
      observer.disconnect();
      root?.removeEventListener("keydown", turn, true);
    };
  },
};
