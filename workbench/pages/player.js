// Goes through the frames of a step: buttons, slider, keys. The frames are in the page, compressed.
"use strict";

const PACES = { slow: 600, normal: 200, fast: 50 }; // milliseconds per frame

async function unpack(base64) {
  const bytes = Uint8Array.from(atob(base64), (sign) => sign.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return JSON.parse(await new Response(stream).text());
}

function start(root, step) {
  const part = (name) => root.querySelector(`[data-part="${name}"]`);
  const slider = part("at"), play = part("play"), said = part("said");
  const last = step.frames.length - 1;
  let at = step.start, timer = 0;

  function show(number) {
    at = Math.min(Math.max(number, 0), last);
    const [picture, table, words] = step.frames[at].map((i) => step.pieces[i]).join("").split("\0");
    part("picture").innerHTML = picture;
    part("table").innerHTML = table;
    slider.value = at;
    slider.setAttribute("aria-valuetext", words);
    if (!timer) said.textContent = words; // read aloud only while the picture holds still
  }

  function halt() {
    clearInterval(timer);
    timer = 0;
    play.textContent = "▶ Play";
    play.setAttribute("aria-pressed", "false");
  }

  function run() {
    if (at === last) at = -1;
    timer = setInterval(() => { show(at + 1); if (at === last) { halt(); show(at); } }, PACES[part("pace").value]);
    play.textContent = "‖ Pause";
    play.setAttribute("aria-pressed", "true");
  }

  const go = (number) => { halt(); show(number); };
  const before = () => step.visits.filter((visit) => visit < at).at(-1) ?? 0;
  const after = () => step.visits.find((visit) => visit > at) ?? last;
  const actions = {
    "visit-before": () => go(before()), "event-before": () => go(at - 1), "event-after": () => go(at + 1),
    "visit-after": () => go(after()), play: () => { if (timer) go(at); else run(); },
  };
  for (const [name, action] of Object.entries(actions)) part(name).addEventListener("click", action);
  slider.addEventListener("input", () => go(+slider.value));
  part("pace").addEventListener("change", () => { if (timer) { halt(); run(); } });

  const keys = {
    " ": actions.play, ArrowLeft: actions["event-before"], ArrowRight: actions["event-after"],
    "Shift+ArrowLeft": actions["visit-before"], "Shift+ArrowRight": actions["visit-after"],
    Home: () => go(0), End: () => go(last),
  };
  root.addEventListener("keydown", (event) => {
    const action = keys[(event.shiftKey ? "Shift+" : "") + event.key];
    const taken = event.ctrlKey || event.altKey || event.metaKey || event.target.closest("select, summary")
      || (event.key === " " && event.target.closest("button") && event.target !== play);
    if (!action || taken) return;
    event.preventDefault();
    action();
  });

  slider.max = last;
  show(at);
  part("controls").hidden = false;
  part("without").hidden = true;
}

function playAll(within) {
  for (const root of within.querySelectorAll(".player")) {
    unpack(root.querySelector("script").textContent)
      .then((step) => start(root, step))
      .catch((error) => { root.querySelector('[data-part="without"]').textContent = `The player does not run here: ${error}`; });
  }
}
