// An element with data-key belongs to the picture of that layer: a click selects the layer and opens its card. An element
// with data-cell too can be dragged to the position of another one. Pictures are redrawn many times per second, so no
// element is stored: a click counts if press and release are over the same layer, and a style rule marks the selected layer.
const DRAG_PX = 6; // pointer movement that starts a drag
const EDGE = 0.28; // share of a cell's width at either end where a layer can be inserted
const CARD_TIMEOUT_MS = 2000;
const MARK = "var(--jp-brand-color1,#1976d2)";

const quoted = (key) => CSS.escape(key);

export default {
  render({ model, el }) {
    const name = Math.random().toString(36).slice(2);
    const style = document.createElement("style");
    const plus = document.createElement("button");
    const label = document.createElement("div");
    let root = null, down = null, over = null;
    plus.className = "l2l-plus";
    plus.textContent = "+";
    plus.tabIndex = -1; // with the keyboard, layers are inserted on the card
    label.className = "l2l-dragged";
    label.hidden = true;
    const hidePlus = () => (plus.hidden = plus.disabled = true);
    hidePlus();

    const draw = () => {
      const here = `[data-touch="${name}"]`, key = quoted(model.get("chosen"));
      const one = `[data-key="${key}"]`;
      style.textContent =
        `${here} :is(rect,path)${one}{stroke:${MARK};stroke-width:3px;stroke-opacity:1}` +
        `${here} tr${one}>*{background:color-mix(in srgb,${MARK} 20%,transparent)}` +
        `${here} tr${one}>:first-child{box-shadow:inset 4px 0 ${MARK};font-weight:600}` +
        (over ? `${here} [data-cell][data-key="${quoted(over)}"]{stroke:${MARK};stroke-width:4px;stroke-dasharray:6 3}` : "");
    };
    // Scroll the table, not the page, to the row of the selected layer.
    const reveal = () => {
      const box = root?.querySelector(".l2l-layers-box");
      const row = box?.querySelector(`tr[data-key="${quoted(model.get("chosen"))}"]`);
      if (!row) return;
      const seen = box.getBoundingClientRect(), at = row.getBoundingClientRect();
      const top = seen.top + (box.querySelector("thead")?.offsetHeight ?? 0);
      if (at.top < top) box.scrollTop -= top - at.top;
      else if (at.bottom > seen.top + box.clientHeight) box.scrollTop += at.bottom - seen.top - box.clientHeight;
    };
    const resized = new ResizeObserver(reveal); // an open card makes the table lower
    const choose = (key) => {
      model.set("chosen", key);
      model.save_changes();
    };
    const at = (event, what) => {
      const found = document.elementFromPoint(event.clientX, event.clientY)?.closest(what);
      return found && root.contains(found) ? found : null;
    };
    const canEdit = () => model.get("can_edit") && !model.get("disabled");
    const place = (part, x, y) => {
      const box = root.getBoundingClientRect();
      part.style.left = `${x - box.left - root.clientLeft + root.scrollLeft}px`;
      part.style.top = `${y - box.top - root.clientTop + root.scrollTop}px`;
      part.hidden = false;
    };
    // The kernel shows the card: `then` is called with its list as soon as that is visible.
    const openCard = (then) => {
      model.send({ open: true });
      const until = performance.now() + CARD_TIMEOUT_MS;
      const wait = () => {
        const list = root.querySelector(".l2l-card-panel select");
        if (list?.offsetParent) then(list);
        else if (list && performance.now() < until) requestAnimationFrame(wait);
      };
      wait();
    };
    const focus = (list) => list.focus();
    const show = (list) => list.closest(".l2l-card-panel").scrollIntoView({ block: "nearest" });
    const endDrag = () => {
      down = over = null;
      label.hidden = true;
      draw();
    };

    const offerInsert = (event) => {
      if (event.target === plus) return;
      const cell = canEdit() && at(event, "[data-cell]");
      hidePlus();
      if (!cell) return;
      const box = cell.getBoundingClientRect(), share = (event.clientX - box.left) / box.width;
      if (share > EDGE && share < 1 - EDGE) return;
      const behind = share > 0.5;
      plus.dataset.next = cell.dataset.key;
      plus.dataset.behind = behind ? "1" : "";
      plus.title = `Insert a layer ${behind ? "after" : "before"} ${cell.dataset.key}`;
      plus.disabled = false;
      place(plus, behind ? box.right : box.left, box.top + box.height / 2);
    };

    const pressed = (event) => {
      if (event.button !== 0 || event.target === plus) return;
      const touched = event.target.closest?.("[data-key]");
      over = null;
      down = touched && { key: touched.dataset.key, drags: "cell" in touched.dataset, x: event.clientX, y: event.clientY };
    };
    const moved = (event) => {
      if (!down) return offerInsert(event);
      if (!event.buttons) return endDrag(); // released outside of the page
      const far = Math.hypot(event.clientX - down.x, event.clientY - down.y) > DRAG_PX;
      if (!(down.drags && canEdit() && (over || far))) return;
      hidePlus();
      over = at(event, "[data-cell]")?.dataset.key ?? down.key;
      label.textContent = `relay.apply(Move(layer='${down.key}', to='${over}'))`;
      place(label, event.clientX + 12, event.clientY + 14);
      draw();
    };
    const lifted = (event) => {
      if (!down) return;
      const { key } = down, target = at(event, "[data-key]"), dragged = over !== null;
      endDrag();
      if (dragged) {
        const to = at(event, "[data-cell]")?.dataset.key;
        if (to && to !== key) model.send({ move: [key, to] });
      } else if (target?.dataset.key === key) {
        choose(key);
        openCard(show);
      }
    };

    const keyed = (event) => {
      if (event.key === "Escape" && down) return endDrag();
      const box = event.target.closest?.(".l2l-picks");
      if (box !== event.target || event.ctrlKey || event.metaKey || event.altKey) return;
      const by = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1, Enter: 0 }[event.key];
      if (by === undefined) return;
      event.preventDefault();
      event.stopPropagation(); // JupyterLab would select another cell
      const parts = [...box.querySelectorAll("[data-key]")];
      const keys = [...new Set(parts.map((part) => part.dataset.key))], chosen = model.get("chosen");
      if (by === 0) return chosen ? openCard(focus) : undefined;
      const found = keys.indexOf(chosen);
      const next = keys[found < 0 ? (by > 0 ? 0 : keys.length - 1) : Math.min(Math.max(found + by, 0), keys.length - 1)];
      if (!next || next === chosen) return;
      choose(next);
      parts.find((part) => part.dataset.key === next && part.tagName === "TR")?.scrollIntoView({ block: "nearest" });
    };
    const focused = (event) => {
      if (event.target.matches?.(".l2l-picks")) event.target.ariaLabel = model.get("hint");
    };
    const inserted = () => {
      model.send({ insert: plus.dataset.next, behind: plus.dataset.behind === "1" });
      hidePlus();
    };

    const listeners = [
      ["pointerdown", pressed],
      ["pointermove", moved],
      ["pointerleave", hidePlus],
      ["keydown", keyed],
      ["focusin", focused],
    ];
    const attach = requestAnimationFrame(() => {
      root = el.closest(".l2l-workbench") ?? el.parentElement;
      root.dataset.touch = name;
      root.append(style, plus, label);
      plus.addEventListener("click", inserted);
      for (const [type, listener] of listeners) root.addEventListener(type, listener);
      document.addEventListener("pointerup", lifted);
      document.addEventListener("pointercancel", endDrag);
      model.on("change:chosen", draw);
      model.on("change:chosen", reveal);
      const box = root.querySelector(".l2l-layers-box");
      if (box) resized.observe(box);
      draw();
    });
    return () => {
      cancelAnimationFrame(attach);
      for (const [type, listener] of listeners) root?.removeEventListener(type, listener);
      document.removeEventListener("pointerup", lifted);
      document.removeEventListener("pointercancel", endDrag);
      model.off("change:chosen", draw);
      model.off("change:chosen", reveal);
      resized.disconnect();
      for (const part of [style, plus, label]) part.remove();
    };
  },
};
