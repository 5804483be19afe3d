// The plan as lines of actions beside its picture. The kernel keeps the plan: keys and drops are sent to it as messages, and it
// answers with new lines. Selecting is done here, so that it needs no answer.
const DRAG_PX = 6; // pointer movement that starts a drag
const NEAR_PX = 5; // distance in the picture's px within which a click meets an event
const SVG = "http://www.w3.org/2000/svg";
const MOVES = { ArrowLeft: "earlier", ArrowRight: "later", ArrowUp: "up", ArrowDown: "down" };

const make = (tag, className, text = "") => {
  const part = document.createElement(tag);
  part.className = className;
  part.textContent = text;
  return part;
};

export default {
  render({ model, el }) {
    const name = `plan-${Math.random().toString(36).slice(2)}`;
    const list = make("div", "l2l-plan-lines");
    const about = make("div", "l2l-plan-about");
    const message = make("div", "l2l-plan-message");
    const lanes = make("div", "l2l-plan-lanes");
    const figures = make("div", "l2l-plan-figures");
    const dragged = make("div", "l2l-dragged");
    let down = null, drop = null, isDrawing = false;
    list.tabIndex = 0;
    list.setAttribute("role", "listbox");
    list.ariaLabel = "Plan: actions in the order of issue. Arrow keys select an action, with Shift they move it, Enter edits it";
    about.ariaLive = message.ariaLive = "polite";
    dragged.hidden = true;

    // With the selection, since changes of traits can arrive after a message.
    const send = (content) =>
      model.send({ ...content, version: model.get("version"), selected: model.get("selected") });
    const idOf = (index) => `${name}-${index}`;
    const wordOf = (index) => list.querySelector(`[data-action="${index}"]`);
    const options = () => [...list.querySelectorAll("[role=option]")].map((part) => +part.dataset.action);
    const select = (index) => {
      model.set("selected", index);
      model.save_changes();
    };

    // -- text -----------------------------------------------------------------------------------------------------------

    const makeWord = ([index, word]) => {
      const isBar = word === "|", kind = word[0];
      const part = make("span", isBar ? "l2l-plan-bar" : "l2l-plan-word", word);
      part.dataset.action = index;
      if (isBar) {
        part.ariaHidden = "true";
        part.title = "Here the layer begins: actions before it are issued first";
        return part;
      }
      part.id = idOf(index);
      part.setAttribute("role", "option");
      part.title = model.get("tips")[kind] ?? "";
      part.style.borderBottomColor = model.get("colours")[kind] ?? "";
      return part;
    };
    const makeLine = ([number, layer, end, last, words]) => {
      const line = make("div", "l2l-plan-line"), head = make("span", "l2l-plan-head"), place = make("span", "l2l-plan-end");
      line.setAttribute("role", "group");
      line.ariaLabel = number === "-" ? "outside of visits" : `visit ${number}, layer ${layer}`;
      line.dataset.end = end;
      head.append(make("b", "", number), ` ${layer === "-" ? "" : layer}`);
      head.ariaHidden = place.ariaHidden = "true";
      place.dataset.last = last;
      const box = make("div", "l2l-plan-words");
      box.append(...words.map(makeWord), place);
      line.append(head, box);
      return line;
    };
    const drawLines = () => {
      if (isDrawing) return; // the blur of an input that is removed
      isDrawing = true;
      const hadInput = list.contains(document.activeElement) && document.activeElement !== list;
      list.replaceChildren(...model.get("lines").map(makeLine));
      isDrawing = false;
      if (hadInput) list.focus({ preventScroll: true });
      mark();
    };
    const mark = () => {
      const selected = model.get("selected"), wrong = model.get("wrong");
      for (const part of list.querySelectorAll("[data-action]")) {
        const index = +part.dataset.action;
        if (part.role === "option") part.ariaSelected = String(index === selected);
        part.classList.toggle("l2l-plan-wrong", index === wrong);
      }
      // the end of a visit, or of the plan, has no word
      const isLast = wrong >= 0 && !wordOf(wrong), ends = [...list.querySelectorAll("[data-last]")];
      const end = isLast && (ends.find((part) => +part.dataset.last >= wrong) ?? ends.at(-1));
      for (const part of ends) {
        part.classList.toggle("l2l-plan-wrong", part === end);
        part.textContent = part === end ? "end" : "";
      }
      if (wordOf(selected)) list.setAttribute("aria-activedescendant", idOf(selected));
      else list.removeAttribute("aria-activedescendant");
      reveal(wordOf(selected));
      markLanes();
    };
    // Scroll the list, not the page.
    const reveal = (part) => {
      if (!part) return;
      const box = list.getBoundingClientRect(), at = part.getBoundingClientRect();
      if (at.top < box.top) list.scrollTop -= box.top - at.top + 4;
      else if (at.bottom > box.bottom) list.scrollTop += at.bottom - box.bottom + 4;
    };
    const openInput = (adds) => {
      const word = wordOf(model.get("selected"));
      if (!word) return send({ none: true });
      const input = make("input", "l2l-plan-input");
      input.value = adds ? "" : word.textContent;
      input.size = 12;
      input.placeholder = "L:L002>0";
      input.ariaLabel = adds ? "Action to add" : "Action";
      if (adds) word.after(input);
      else word.replaceWith(input);
      input.addEventListener("keydown", (event) => {
        event.stopPropagation();
        if (event.key === "Escape") drawLines(), list.focus(), send({ cancel: true });
        if (event.key === "Enter") send({ [adds ? "insert" : "write"]: [model.get("selected"), input.value] });
      });
      input.addEventListener("blur", drawLines);
      input.focus();
      input.select();
    };

    // -- keys -----------------------------------------------------------------------------------------------------------

    const keyed = (event) => {
      if (event.target !== list || event.altKey) return;
      const isUndo = (event.ctrlKey || event.metaKey) && event.key.toLowerCase() === "z";
      if ((event.ctrlKey || event.metaKey) && !isUndo) return;
      if (isUndo) send({ [event.shiftKey ? "redo" : "undo"]: true });
      else if (event.shiftKey && MOVES[event.key]) send({ key: MOVES[event.key] });
      else if (event.key === "Delete" || event.key === "Backspace") send({ key: "remove" });
      else if (event.key === "Enter" || event.key === "F2") openInput(false);
      else if (event.key === "+" || event.key === "Insert") openInput(true);
      else if (event.key === "Escape" && down) endDrag();
      else if (!walk(event.key)) return;
      event.preventDefault();
      event.stopPropagation(); // JupyterLab would select another cell
    };
    const walk = (key) => {
      const all = options(), at = all.indexOf(model.get("selected"));
      const next = { ArrowLeft: at - 1, ArrowRight: at + 1, Home: 0, End: all.length - 1 }[key];
      if (next !== undefined) select(all[at < 0 ? 0 : Math.min(Math.max(next, 0), all.length - 1)]);
      else if (key === "ArrowUp" || key === "ArrowDown") walkLines(key === "ArrowUp" ? -1 : 1);
      else return false;
      return true;
    };
    // The word of the next line that is nearest below or above.
    const walkLines = (by) => {
      const word = wordOf(model.get("selected")), rows = [...list.children];
      if (!word) return walk("Home");
      const x = word.getBoundingClientRect().left;
      for (let row = rows.indexOf(word.closest("[data-end]")) + by; rows[row]; row += by) {
        const words = [...rows[row].querySelectorAll("[role=option]")];
        const distance = (part) => Math.abs(part.getBoundingClientRect().left - x);
        if (words.length) return select(+words.reduce((a, b) => (distance(b) < distance(a) ? b : a)).dataset.action);
      }
    };

    // -- pointer --------------------------------------------------------------------------------------------------------

    const pressed = (event) => {
      const word = event.target.closest("[role=option]");
      if (event.button !== 0 || !word) return;
      down = { index: +word.dataset.action, text: word.textContent, x: event.clientX, y: event.clientY };
      select(down.index);
    };
    // The place between words at the pointer: the position of the action after it, and the part that shows it.
    const placeAt = (event) => {
      const line = document.elementFromPoint(event.clientX, event.clientY)?.closest(".l2l-plan-line");
      if (!line || !list.contains(line)) return null;
      const words = [...line.querySelectorAll("[data-action]")];
      const after = words.find((part) => {
        const box = part.getBoundingClientRect();
        return event.clientY < box.bottom && event.clientX < box.left + box.width / 2;
      });
      return after ? [+after.dataset.action, after] : [+line.dataset.end, line.querySelector(".l2l-plan-end")];
    };
    const showDrop = (part) => {
      for (const old of list.querySelectorAll(".l2l-plan-drop")) old.classList.remove("l2l-plan-drop");
      part?.classList.add("l2l-plan-drop");
    };
    const moved = (event) => {
      if (!down) return;
      if (!event.buttons) return endDrag(); // released outside of the page
      if (!drop && Math.hypot(event.clientX - down.x, event.clientY - down.y) <= DRAG_PX) return;
      drop = { place: placeAt(event) };
      showDrop(drop.place?.[1]);
      dragged.textContent = down.text;
      const box = el.getBoundingClientRect();
      dragged.style.left = `${event.clientX - box.left + 12}px`;
      dragged.style.top = `${event.clientY - box.top + 14}px`;
      dragged.hidden = false;
    };
    const lifted = () => {
      if (!down) return;
      const { index } = down, place = drop?.place;
      endDrag();
      if (place) send({ drop: [index, place[0]] });
    };
    const endDrag = () => {
      down = drop = null;
      dragged.hidden = true;
      showDrop(null);
    };

    // -- lanes ----------------------------------------------------------------------------------------------------------

    const drawLanes = () => {
      lanes.innerHTML = model.get("picture");
      markLanes();
    };
    const markLanes = () => {
      const svg = lanes.querySelector("svg"), selected = model.get("selected");
      if (!svg) return;
      svg.querySelector(".l2l-plan-mark")?.remove();
      const own = model.get("is_stale") ? [] : model.get("spans").filter((span) => span[0] === selected);
      const group = document.createElementNS(SVG, "g");
      group.setAttribute("class", "l2l-plan-mark");
      for (const [, left, right, top, bottom] of own) {
        const box = document.createElementNS(SVG, "rect");
        const at = { x: left - 1, y: top - 1, width: right - left + 2, height: bottom - top + 2 };
        for (const [key, value] of Object.entries(at)) box.setAttribute(key, value);
        group.append(box);
      }
      svg.append(group);
    };
    const picked = (event) => {
      const svg = event.target.closest("svg");
      if (!svg || model.get("is_stale")) return;
      const { x, y } = new DOMPoint(event.clientX, event.clientY).matrixTransform(svg.getScreenCTM().inverse());
      const distance = ([, left, right]) => Math.max(left - x, x - right, 0);
      const near = model.get("spans").filter((span) => span[3] <= y && y <= span[4] && distance(span) <= NEAR_PX);
      if (!near.length) return;
      select(near.reduce((a, b) => (distance(b) < distance(a) ? b : a))[0]);
      list.focus({ preventScroll: true });
    };

    const drawStale = () => {
      lanes.classList.toggle("l2l-plan-stale", model.get("is_stale"));
      figures.classList.toggle("l2l-plan-stale", model.get("is_stale"));
      markLanes();
    };
    const drawTexts = () => {
      about.innerHTML = model.get("about");
      message.innerHTML = model.get("message");
      figures.innerHTML = model.get("figures");
    };
    const opened = ({ edit, add }) => (edit || add) && openInput(Boolean(add));

    const text = make("div", "l2l-plan-text");
    text.append(list, message, about);
    el.classList.add("l2l-plan");
    el.append(text, lanes, figures, dragged);
    list.addEventListener("keydown", keyed);
    list.addEventListener("pointerdown", pressed);
    list.addEventListener("dblclick", (event) => event.target.closest("[role=option]") && openInput(false));
    lanes.addEventListener("click", picked);
    document.addEventListener("pointermove", moved);
    document.addEventListener("pointerup", lifted);
    document.addEventListener("pointercancel", endDrag);
    model.on("change:version change:lines", drawLines);
    model.on("change:selected change:wrong", mark);
    model.on("change:picture change:spans", drawLanes);
    model.on("change:is_stale", drawStale);
    model.on("change:about change:message change:figures", drawTexts);
    model.on("msg:custom", opened);
    drawLines(), drawLanes(), drawStale(), drawTexts();
    return () => {
      document.removeEventListener("pointermove", moved);
      document.removeEventListener("pointerup", lifted);
      document.removeEventListener("pointercancel", endDrag);
      model.off("change:version change:lines", drawLines);
      model.off("change:selected change:wrong", mark);
      model.off("change:picture change:spans", drawLanes);
      model.off("change:is_stale", drawStale);
      model.off("change:about change:message change:figures", drawTexts);
      model.off("msg:custom", opened);
    };
  },
};
