// The page: position, keys, address, texts, and the self-test.

const FIGURES = ["Step", "Time", "Rows, tokens", "Blocks used, cached, empty", "Allocated next", "Host blocks, files",
  "Preemptions, evictions, copies", "Tokens computed again", "Drafts kept of proposed", "Output tokens",
  "TTFT p50, p99", "ITL p50, p99", "Steps by what limits admission"];
const MINE = ["My request", "Arrived, first token", "Tokens, mean and longest ITL", "Blocks, positions", "Preempted"];
const EVENT = (line) => ["arrive", "refused", "left", "admitted", "preempted", "ended", "copies", "evict", "void", "reset", "resize", "pause", "resume"]
  .some((name) => name in line);
const CLOCKS = {
  virtual: "times of a simulation",
  host: "times of the host: a step lasts from its plan, or the commit before, to its commit",
  live: "times of the host; several steps may be one, drawn as the last of them",
};
const QUEUE_LENGTH = 14;
const REFRESH_MS = 300;

const page = {
  films: [], views: [], active: 0, at: 0, mine: null, spanUs: 0, playing: null, ink: null, errors: [], violations: [],
  latencies: new Map(), refresh: null,
};

function filmNow() {
  return page.films[page.active];
}

function positionOf(index) {
  if (index === page.active) return page.at;
  const film = page.films[index], active = filmNow();
  if (page.at >= active.length && active.timeOf(page.at) >= film.endUs) return film.length;
  return film.frameAt(active.timeOf(page.at));
}

// Shows films, instead of those that were shown before.
function start(films) {
  const template = document.getElementById("film");
  document.getElementById("films").replaceChildren();
  page.films = films;
  page.views = [];
  page.latencies.clear();
  for (const film of page.films) {
    const section = template.content.firstElementChild.cloneNode(true);
    document.getElementById("films").append(section);
    const view = { section, layout: {}, find: (name) => section.querySelector(name) };
    view.find("h2").textContent = film.header.title;
    view.find(".slots").setAttribute("aria-label", "Slots over time: a row a slot, a cell a row of a step, as wide as the step is long");
    view.find(".pool").setAttribute("aria-label", "Block pool: a square a block");
    page.views.push(view);
  }
  const usedSlots = Math.max(...page.films.map((film) => film.usedSlots));
  for (const film of page.films) film.usedSlots = usedSlots;
  document.getElementById("films").classList.toggle("two", page.films.length > 1);
  const header = page.films[0].header;
  document.getElementById("facts").textContent = `${header.policy}, ${header.blocks} blocks of ${header.block_size} tokens, `
    + `${header.slots} slots, ${header.budget} tokens a step, depth ${header.depth}; forge ${header.forge}, `
    + CLOCKS[header.clock];
  if (matchMedia("(prefers-reduced-motion: reduce)").matches) document.getElementById("speed").value = "-2";
  page.ink = colours();
  page.spanUs = defaultSpan();
  document.getElementById("slider").max = filmNow().length;
  page.views.forEach(listenToView);
  readAddress();
  draw();
}

function defaultSpan() {
  const spans = filmNow().frames.filter((frame) => frame.end).map((frame) => frame.end - frame.begin);
  const median = quantile(Float64Array.from(spans).sort(), 0.5);
  return Math.max(1, 40 * (Number.isFinite(median) && median ? median : filmNow().endUs / 40));
}

// Drawing

function draw() {
  const ink = page.ink, endUs = Math.max(...page.films.map((film) => film.endUs));
  const tallest = page.films.length > 1 ? 200 : 330;
  drawStrip(document.getElementById("strip"), filmNow(), page.at, endUs, ink);
  page.films.forEach((film, index) => {
    const view = page.views[index], at = positionOf(index);
    view.section.classList.toggle("active", page.films.length > 1 && index === page.active);
    Object.assign(view.layout, drawSlots(view.find(".slots"), film, at, page.mine, page.spanUs, tallest, ink));
    Object.assign(view.layout, drawPool(view.find(".pool"), film, at, page.mine, 0.7 * tallest, ink));
    writeStatus(view, film, at);
    writeQueue(view, film, at);
    writeTable(view, film, at);
  });
  writeFigures();
  const slider = document.getElementById("slider");
  slider.value = page.at;
  slider.setAttribute("aria-valuetext", `step ${page.at} of ${filmNow().length}, ${formatUs(filmNow().timeOf(page.at))}`);
}

function describeEvents(film, at) {
  const texts = [];
  const name = (seq) => `${film.label(seq)}`;
  for (const line of film.linesOf(at)) {
    if (line.steps) texts.push(`${line.steps} steps since the frame before`);
    if ("arrive" in line) texts.push(`${line.arrive} arrives: ${line.prompt} prompt tokens, ${line.output ?? "any number"} of output`);
    if ("refused" in line) texts.push(`${line.refused} refused: ${line.why}`);
    if ("left" in line) texts.push(`the client of ${line.left} leaves`);
    if (line.resize) texts.push(`pool resized to ${line.resize[0] ?? film.header.blocks} blocks`);
    if (line.weights) texts.push("new weights: every block is dropped");
    else if (line.sleep) texts.push("the model sleeps: every block is dropped");
    else if (line.reset) texts.push("prefix cache reset");
    if (line.pause) texts.push(`paused: ${line.pause}`);
    if (line.resume) texts.push("resumed");
    if ("void" in line) texts.push(`plans in flight are void: ${line.void}`);
    for (const [seq, why] of line.ended || []) texts.push(`${name(seq)} ends: ${why}`);
    for (const [seq, why] of line.preempted || []) texts.push(`${name(seq)} preempted: ${why}`);
    for (const [seq, why] of line.admitted || []) texts.push(`${name(seq)} admitted: ${why}`);
    for (const [source, target] of line.copies || []) texts.push(`block ${source} copied to ${target}`);
    if (line.evict) texts.push(`evicted: ${line.evict.length > 8 ? `${line.evict.length} blocks` : `block ${line.evict.join(", ")}`}`);
    for (const [seq, kept] of line.kept || []) texts.push(`${name(seq)} keeps ${kept} drafts`);
    if ((line.loads || []).length) texts.push(`${line.loads.length} blocks loaded from the host`);
    if ((line.stores || []).length) texts.push(`${line.stores.length} blocks stored to the host`);
  }
  return texts;
}

function writeStatus(view, film, at) {
  const step = at < film.length ? `Step ${film.frames[at].step}. ` : "The end. ";
  const texts = describeEvents(film, at);
  view.find(".status").textContent = step + (texts.join("; ") || "Nothing is decided: each row is one more token") + ".";
}

function waitReasons(film, at) {
  const state = film.seek(at), [limit, why, reasons] = state.wait || ["", "", {}];
  const queue = state.waiting.map((seq) => ({ seq, why: reasons[seq] || why || "it arrived after this plan was made" }));
  return { limit, why, queue };
}

function writeQueue(view, film, at) {
  const { limit, why, queue } = waitReasons(film, at);
  view.find(".limit").textContent = queue.length
    ? `${queue.length} wait. ${limit ? `Admission ended: ${why}.` : "Those that wait were passed over."}` : "No request waits.";
  const list = view.find(".queue");
  list.replaceChildren(...queue.slice(0, QUEUE_LENGTH).map(({ seq, why }) => {
    const item = document.createElement("li"), button = document.createElement("button");
    button.type = "button";
    button.dataset.seq = seq;
    button.classList.toggle("mine", seq === page.mine);
    button.textContent = `${film.label(seq)}: ${why}`;
    item.append(button);
    return item;
  }));
  if (queue.length > QUEUE_LENGTH) {
    const item = document.createElement("li");
    item.textContent = `and ${queue.length - QUEUE_LENGTH} more`;
    list.append(item);
  }
}

function writeTable(view, film, at) {
  const state = film.seek(at), table = state.tables.get(page.mine);
  view.find(".table").textContent = table
    ? `Block table of ${film.label(page.mine)}: ${table.map((block) => (state.refs[block] > 1 ? `${block} (${state.refs[block]} tables)` : block)).join(" ")}` : "";
}

function figures(film, at) {
  const state = film.seek(at), frame = film.frames[at], us = film.timeOf(at);
  const total = frame ? frame.total : film.total;
  const { used, cached, empty } = state.counts();
  const { ttft, itl } = latenciesOf(film, us);
  const pair = (values) => `${formatUs(quantile(values, 0.5))}, ${formatUs(quantile(values, 0.99))}`;
  const next = state.next === null ? "no block is free" : `${state.next}${state.published[state.next] ? ", evicted then" : ", empty"}`;
  const sum = Object.values(total.limits).reduce((a, b) => a + b, 0);
  const limits = Object.entries(total.limits).sort((a, b) => b[1] - a[1]).map(([name, count]) => `${name} ${Math.round((100 * count) / sum)} %`);
  const values = [
    film.isLive ? (frame ? `${frame.step}` : "now") : at < film.length ? `${frame.step} of ${film.length}` : `the end, after ${film.length}`, formatUs(us),
    frame ? `${frame.rows.length}, ${frame.tokens.reduce((a, b) => a + b, 0)} of ${film.header.budget}` : "–",
    `${used}, ${cached}, ${empty} of ${state.numBlocks}`, next,
    film.header.host_blocks ? `${state.host}, ${state.disk}` : null,
    `${total.preempted}, ${total.evicted}, ${total.copies}`, film.isLive ? null : `${total.again}`,
    total.drafts ? `${total.kept} of ${total.drafts}` : null, `${total.output}`, film.isLive ? null : pair(ttft), film.isLive ? null : pair(itl), limits.join(", "),
  ];
  return FIGURES.map((name, i) => [name, values[i]]).concat(mineFigures(film, state, us)).filter(([, value]) => value !== null);
}

function mineFigures(film, state, us) {
  const request = page.mine === null ? null : film.requests.get((film.requestOf.get(page.mine) || [])[0]);
  if (!request) return MINE.map((name) => [name, null]);
  const times = request.times.filter((each) => each <= us), gaps = times.slice(1).map((each, i) => each - times[i]);
  const isLive = state.live.has(page.mine), table = state.tables.get(page.mine), epoch = state.epochs.get(page.mine);
  const ended = request.ended.length ? request.ended[0] : null;
  const stage = isLive ? (table ? "runs" : "waits") : ended && ended[0] <= us ? `ended, ${ended[1]}` : "has not arrived";
  const mean = gaps.length ? gaps.reduce((a, b) => a + b, 0) / gaps.length : NaN;
  return [
    ["My request", `${film.label(page.mine)}: ${stage}`],
    ["Arrived, first token", film.isLive ? null : `${request.at === null ? "before" : formatUs(request.at)}, ${times.length && request.at !== null ? `after ${formatUs(times[0] - request.at)}` : "–"}`],
    ["Tokens, mean and longest ITL", film.isLive ? null : `${times.length}, ${formatUs(mean)}, ${formatUs(gaps.length ? Math.max(...gaps) : NaN)}`],
    ["Blocks, positions", table ? `${table.length}, ${state.numTokens.get(page.mine)}` : "none"],
    ["Preempted", isLive ? `${epoch} ${epoch === 1 ? "time" : "times"}` : "–"],
  ];
}

// Quantiles of a long run take milliseconds: while the position changes they are refreshed now and then.
function latenciesOf(film, us) {
  const known = page.latencies.get(film);
  if (known && known.us === us) return known.found;
  if (known && performance.now() - known.at < REFRESH_MS) {
    clearTimeout(page.refresh);
    page.refresh = setTimeout(writeFigures, REFRESH_MS);
    return known.found;
  }
  const found = film.latencies(us);
  page.latencies.set(film, { us, at: performance.now(), found });
  return found;
}

function writeFigures() {
  const all = page.films.map((film, index) => figures(film, positionOf(index)));
  page.views.forEach((view, index) => {
    const others = new Map(all.flatMap((each, other) => (other === index ? [] : each)));
    view.find(".figures tbody").replaceChildren(...all[index].map(([name, value]) => {
      const row = document.createElement("tr"), head = document.createElement("th"), cell = document.createElement("td");
      head.textContent = name;
      head.scope = "row";
      cell.textContent = value;
      cell.classList.toggle("differs", all.length > 1 && others.get(name) !== value);
      row.append(head, cell);
      return row;
    }));
  });
}

// Position

function go(at) {
  page.at = Math.max(0, Math.min(filmNow().length, at));
  draw();
  history.replaceState(null, "", `#${new URLSearchParams({ at: page.at, ...(page.mine === null ? {} : { seq: page.mine }), ...(page.active ? { film: page.active } : {}) })}`);
}

function choose(seq) {
  page.mine = seq;
  go(page.at);
}

function readAddress() {
  const values = new URLSearchParams(location.hash.slice(1));
  if (values.has("film")) page.active = Math.max(0, Math.min(page.films.length - 1, Number(values.get("film")) || 0));
  if (values.has("seq")) page.mine = Number(values.get("seq"));
  if (values.has("zoom")) page.spanUs = defaultSpan() / (Number(values.get("zoom")) || 1);
  if (values.has("at")) page.at = Math.max(0, Math.min(filmNow().length, Number(values.get("at")) || 0));
}

const KEYS = {
  ArrowRight: (shift) => go(shift ? filmNow().find(page.at, 1, EVENT) : page.at + 1),
  ArrowLeft: (shift) => go(shift ? filmNow().find(page.at, -1, EVENT) : page.at - 1),
  Home: () => go(0),
  End: () => go(filmNow().length),
  p: () => go(filmNow().find(page.at, 1, (line) => line.preempted)),
  P: () => go(filmNow().find(page.at, -1, (line) => line.preempted)),
  e: () => go(filmNow().find(page.at, 1, (line) => line.evict)),
  E: () => go(filmNow().find(page.at, -1, (line) => line.evict)),
  m: () => go(filmNow().find(page.at, 1, isMine)),
  M: () => go(filmNow().find(page.at, -1, isMine)),
  x: () => activate((page.active + 1) % page.films.length),
  " ": () => play(),
  "/": () => document.getElementById("find").focus(),
  "+": () => zoom(1.5),
  "-": () => zoom(1 / 1.5),
};

function isMine(line) {
  const names = (events) => (events || []).some(([seq]) => seq === page.mine);
  const request = (filmNow().requestOf.get(page.mine) || [])[0];
  return names(line.admitted) || names(line.preempted) || names(line.ended) || (request !== undefined && line.arrive === request);
}

function zoom(factor) {
  page.spanUs /= factor;
  draw();
}

function activate(index) {
  const us = filmNow().timeOf(page.at);
  page.active = index;
  page.at = filmNow().frameAt(us);
  document.getElementById("slider").max = filmNow().length;
  go(page.at);
}

function play() {
  const button = document.getElementById("play");
  if (page.playing) {
    cancelAnimationFrame(page.playing);
    page.playing = null;
  } else {
    if (page.at >= filmNow().length) page.at = 0;
    let last = performance.now(), us = filmNow().timeOf(page.at), position = page.at;
    const advance = (now) => {
      const speed = Number(document.getElementById("speed").value), passed = Math.min(200, now - last);
      last = now;
      if (speed > 0) {
        us += passed * 1000 * speed;
        position = us >= filmNow().endUs ? filmNow().length : filmNow().frameAt(us);
      } else position = Math.min(filmNow().length, position - passed * speed / 1000);
      if (Math.floor(position) !== page.at) go(Math.floor(position));
      page.playing = page.at < filmNow().length ? requestAnimationFrame(advance) : null;
      if (!page.playing) showPlaying(button);
    };
    page.playing = requestAnimationFrame(advance);
  }
  showPlaying(button);
  draw();
}

function showPlaying(button) {
  button.textContent = page.playing ? "Pause" : "Play";
  button.setAttribute("aria-pressed", String(page.playing !== null));
}

function press(key, shift) {
  const action = KEYS[key];
  if (action) action(shift);
  return action !== undefined;
}

function listen() {
  document.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("input:not([type=range]), select")) return;
    if (event.key === " " && event.target.closest?.("button")) return;
    if (press(event.key, event.shiftKey)) event.preventDefault();
  });
  for (const button of document.querySelectorAll("#bar button[data-key]")) {
    button.addEventListener("click", (event) => press(button.dataset.key, event.shiftKey));
  }
  document.getElementById("play").addEventListener("click", () => play());
  document.getElementById("slider").addEventListener("input", (event) => go(Number(event.target.value)));
  document.getElementById("find").addEventListener("keydown", (event) => {
    if (event.key === "Escape") event.target.blur();
    if (event.key !== "Enter") return;
    const request = filmNow().requests.get(Number(event.target.value));
    if (!request) return;
    page.mine = request.first;
    go(filmNow().find(-1, 1, isMine));
    event.target.blur();
  });
  document.getElementById("strip").addEventListener("click", (event) => {
    const endUs = Math.max(...page.films.map((film) => film.endUs));
    go(filmNow().frameAt((event.offsetX / event.target.clientWidth) * endUs));
  });
  window.addEventListener("hashchange", () => { readAddress(); draw(); });
  window.addEventListener("resize", () => draw());
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { page.ink = colours(); draw(); });
}

function listenToView(view, index) {
  view.find(".pool").addEventListener("click", (event) => {
    const { size, columns, owner } = view.layout;
    const seq = owner[Math.floor(event.offsetY / size) * columns + Math.floor(event.offsetX / size)];
    if (seq >= 0) choose(seq);
  });
  view.find(".slots").addEventListener("click", (event) => {
    const slot = Math.floor(event.offsetY / view.layout.rowHeight);
    for (const [seq, each] of page.films[index].seek(positionOf(index)).slots) if (each === slot) choose(seq);
  });
  view.find(".queue").addEventListener("click", (event) => {
    if (event.target.dataset.seq) choose(Number(event.target.dataset.seq));
  });
}
