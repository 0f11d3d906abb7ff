// Drawings of a film on canvases. They read frames and states, and keep nothing but sizes.

const KIND_COLOURS = ["#e69f00", "#56b4e9", "#009e73", "#d55e00"];
const KIND_LETTERS = ["P", "d", "v", "A"];
const OWNER_COLOURS = ["#56b4e9", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#5f8fd8"];
const GAP = 3;

function colours() {
  const style = getComputedStyle(document.documentElement);
  const names = ["ground", "text", "muted", "line", "panel", "strong"];
  return Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
}

// Sizes the canvas to its width in the page and this height, and returns a context in CSS pixels.
function begin(canvas, height) {
  const width = canvas.clientWidth || 900, ratio = window.devicePixelRatio || 1;
  const pixels = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== pixels[0] || canvas.height !== pixels[1]) [canvas.width, canvas.height] = pixels;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  context.clearRect(0, 0, width, height);
  context.font = "10px system-ui, sans-serif";
  context.textBaseline = "middle";
  return [context, width];
}

function hatch(context, front, back) {
  const tile = document.createElement("canvas");
  tile.width = tile.height = 6;
  const inner = tile.getContext("2d");
  inner.fillStyle = back;
  inner.fillRect(0, 0, 6, 6);
  inner.strokeStyle = front;
  inner.lineWidth = 1.5;
  for (const shift of [-6, 0, 6]) {
    inner.beginPath();
    inner.moveTo(shift, 6);
    inner.lineTo(shift + 6, 0);
    inner.stroke();
  }
  return context.createPattern(tile, "repeat");
}

function formatUs(us) {
  if (!Number.isFinite(us)) return "–";
  if (us >= 10e6) return `${(us / 1e6).toFixed(1)} s`;
  if (us >= 10e3) return `${(us / 1e3).toFixed(1)} ms`;
  return `${(us / 1e3).toFixed(2)} ms`;
}

// The whole run: tokens of each step by kind, and marks. Heights are square roots, so that decodes are seen.
function drawStrip(canvas, film, at, endUs, ink) {
  const height = 74, [context, width] = begin(canvas, height);
  const key = JSON.stringify([canvas.width, canvas.height, film.lines.length, endUs, ink]);
  if (film.strip?.key !== key) {
    const picture = document.createElement("canvas");
    [picture.width, picture.height] = [canvas.width, canvas.height];
    const inner = picture.getContext("2d");
    inner.setTransform(canvas.width / width, 0, 0, canvas.height / height, 0, 0);
    paintStrip(inner, film, width, height, endUs, ink);
    film.strip = { key, picture };
  }
  context.drawImage(film.strip.picture, 0, 0, width, height);
  context.fillStyle = ink.strong;
  context.fillRect(Math.min(width - 2, (film.timeOf(at) * width) / Math.max(1, endUs) - 1), 0, 2, height);
}

function paintStrip(context, film, width, height, endUs, ink) {
  const top = 12;
  context.font = "10px system-ui, sans-serif";
  context.textBaseline = "middle";
  const scale = width / Math.max(1, endUs), columns = Math.ceil(width);
  const sums = new Float64Array(4 * columns), counts = new Int32Array(columns);
  const marks = [];
  let most = 1;
  for (const frame of film.frames) {
    const x = Math.min(columns - 1, Math.floor(frame.begin * scale));
    for (let kind = 0; kind < 4; kind++) sums[4 * x + kind] += frame.tokens[kind];
    counts[x]++;
  }
  for (let x = 0; x < columns; x++) {
    if (!counts[x]) continue;
    let sum = 0;
    for (let kind = 0; kind < 4; kind++) sum += sums[4 * x + kind] /= counts[x];
    most = Math.max(most, sum);
  }
  let x = 0;
  while (x < columns) {
    if (!counts[x]) { x++; continue; }
    let end = x + 1;
    while (end < columns && !counts[end] && end - x < 400) end++;
    const isLast = end === columns;
    const total = sums[4 * x] + sums[4 * x + 1] + sums[4 * x + 2] + sums[4 * x + 3];
    const unit = total ? Math.sqrt(total / most) * (height - top) / total : 0;
    let y = height;
    for (const kind of [DECODE, DRAFTS, PROMPT, AGAIN]) {
      const tall = sums[4 * x + kind] * unit;
      context.fillStyle = KIND_COLOURS[kind];
      context.fillRect(x, y - tall, isLast ? 1 : end - x, tall);
      y -= tall;
    }
    x = end;
  }
  for (const line of film.lines) {
    if (line.preempted) marks.push([line.at, "▼", "#d55e00"]);
    else if ("refused" in line) marks.push([line.at, "×", ink.strong]);
    else if (line.evict) marks.push([line.at, "'", ink.muted]);
  }
  context.textAlign = "center";
  let last = {};
  for (const [us, mark, colour] of marks) {
    const place = Math.floor(us * scale);
    if (last[mark] !== undefined && place - last[mark] < 4) continue;
    last[mark] = place;
    context.fillStyle = colour;
    context.fillText(mark, place, 6);
  }
}

// Rows of slots over time around a frame, with the lanes of host and device below.
function drawSlots(canvas, film, at, mine, spanUs, tallest, ink) {
  const frames = film.frames, current = frames[Math.min(at, frames.length - 1)];
  const numSlots = film.usedSlots, margin = 34, lane = 13;
  const rowHeight = Math.max(2, Math.min(17, Math.floor(tallest / Math.max(1, numSlots))));
  const height = numSlots * rowHeight + 2 * lane + 3 * GAP + 16;
  const [context, width] = begin(canvas, height);
  if (!current) return { rowHeight, x: () => 0 };
  const nowUs = at < frames.length ? (current.end ?? current.at) : film.endUs;
  const left = Math.max(0, Math.min(nowUs - 0.7 * spanUs, Math.max(0, film.endUs - spanUs)));
  const scale = (width - margin) / spanUs, x = (us) => margin + (us - left) * scale;
  const again = hatch(context, "#f5b183", KIND_COLOURS[AGAIN]);
  const fills = [KIND_COLOURS[0], KIND_COLOURS[1], KIND_COLOURS[2], again];
  const first = film.frameAt(left), visible = [];
  for (let i = Math.max(0, first - 2); i < frames.length && frames[i].begin <= left + spanUs; i++) visible.push(i);
  context.save();
  context.beginPath();
  context.rect(margin, 0, width - margin, height);
  context.clip();
  const endOf = (i) => frames[i].end ?? Math.max(film.endUs, frames[i].at);
  let k = 0;
  while (k < visible.length) { // steps of the same rows are drawn at once
    let last = k;
    const frame = frames[visible[k]];
    while (last + 1 < visible.length && frames[visible[last + 1]].rows === frame.rows
      && frames[visible[last + 1]].begin - endOf(visible[last]) < 2 / scale) last++;
    const from = x(frame.begin), wide = Math.max(1, x(endOf(visible[last])) - from);
    for (const row of frame.rows) {
      const y = row.slot * rowHeight;
      context.fillStyle = fills[row.kind];
      context.fillRect(from, y, wide, rowHeight - (rowHeight > 4 ? 1 : 0));
      if (row.seq === mine) {
        context.fillStyle = ink.strong;
        context.fillRect(from, y + rowHeight - 2, wide, 2);
      }
    }
    k = last + 1;
  }
  context.textAlign = "center";
  for (const i of visible) {
    const frame = frames[i], from = x(frame.begin), wide = x(endOf(i)) - from;
    if (wide >= 5) {
      context.fillStyle = ink.ground;
      context.fillRect(from, 0, 1, numSlots * rowHeight);
    }
    if (rowHeight < 10) continue;
    for (const [seq, slot] of frame.idle) {
      context.fillStyle = seq === mine ? ink.strong : ink.muted;
      context.fillRect(from + 2, (slot + 0.5) * rowHeight - 0.5, Math.max(1, Math.min(6, wide - 4)), 1);
    }
    if (wide < 9) continue;
    context.fillStyle = "#000";
    for (const row of frame.rows) context.fillText(cellText(row, frame, wide), from + wide / 2, (row.slot + 0.5) * rowHeight);
  }
  drawLanes(context, film, visible, x, numSlots * rowHeight + GAP, lane, ink);
  if (at < frames.length) {
    context.strokeStyle = ink.strong;
    context.lineWidth = 2;
    context.strokeRect(x(current.begin), 1, Math.max(2, x(endOf(at)) - x(current.begin)), numSlots * rowHeight - 1);
  }
  context.restore();
  labelSlots(context, film, at, mine, rowHeight, ink);
  context.fillStyle = ink.muted;
  context.textAlign = "left";
  const base = numSlots * rowHeight + GAP;
  context.fillText("host", 0, base + lane / 2);
  context.fillText("device", 0, base + lane + GAP + lane / 2);
  context.fillText(formatUs(left), margin, height - 6);
  context.textAlign = "right";
  context.fillText(`${formatUs(spanUs)} wide, to ${formatUs(left + spanUs)}`, width, height - 6);
  return { rowHeight, x, margin };
}

function cellText(row, frame, wide) {
  const letter = KIND_LETTERS[row.kind];
  if (row.kind === DRAFTS && wide >= 26) {
    const kept = frame.kept ? frame.kept.get(row.seq) : null;
    return kept === null || kept === undefined ? `v${row.drafts}` : `v${kept}/${row.drafts}`;
  }
  return wide >= 30 && row.n > 1 ? `${letter}${row.n}` : letter;
}

function labelSlots(context, film, at, mine, rowHeight, ink) {
  if (rowHeight < 9) return;
  const state = film.seek(at);
  context.textAlign = "left";
  for (const [seq, slot] of state.slots) {
    context.fillStyle = seq === mine ? ink.strong : ink.muted;
    context.font = `${seq === mine ? "bold " : ""}10px system-ui, sans-serif`;
    context.fillText(film.label(seq), 0, (slot + 0.5) * rowHeight);
  }
  context.font = "10px system-ui, sans-serif";
}

// What the host does (plan and launch, then commit) and what the device does.
function drawLanes(context, film, visible, x, top, lane, ink) {
  let hostUs = visible.length && visible[0] ? film.frames[visible[0] - 1].done ?? 0 : 0;
  for (const i of visible) {
    const frame = film.frames[i];
    context.fillStyle = ink.muted;
    const launched = frame.launched ?? frame.at;
    const from = frame.launched === null ? Math.min(hostUs, frame.at) : frame.at;
    context.fillRect(x(from), top, Math.max(1, x(launched) - x(from)), lane);
    hostUs = Math.max(hostUs, launched);
    if (frame.end === null) continue;
    context.fillStyle = i % 2 ? "#0072b2" : "#56b4e9";
    context.fillRect(x(frame.begin), top + lane + GAP, Math.max(1, x(frame.end) - x(frame.begin)), lane);
    const commit = Math.max(frame.end, Math.min(hostUs, frame.done));
    context.fillStyle = "#009e73";
    context.fillRect(x(commit), top, Math.max(1, x(frame.done) - x(commit)), lane);
    hostUs = Math.max(hostUs, frame.done);
  }
}

// A square for each block. Returns the layout, to find the block under the pointer.
function drawPool(canvas, film, at, mine, tallest, ink) {
  const state = film.seek(at), num = state.numBlocks, width = canvas.clientWidth || 400;
  const size = Math.max(3, Math.min(32, Math.floor(Math.sqrt((width * tallest) / num))));
  const columns = Math.max(1, Math.floor(width / size)), height = Math.ceil(num / columns) * size + 2;
  const [context] = begin(canvas, height);
  const owner = new Int32Array(num).fill(-1);
  for (const [seq, blocks] of state.tables) for (const block of blocks) owner[block] = seq;
  const inner = size - (size > 4 ? 1 : 0);
  const place = (block) => [(block % columns) * size, Math.floor(block / columns) * size];
  const groups = new Map(), cached = [[], [], [], []];
  context.strokeStyle = ink.line;
  context.lineWidth = 1;
  context.beginPath();
  for (let block = 0; block < num; block++) {
    if (state.refs[block]) {
      const colour = OWNER_COLOURS[owner[block] % OWNER_COLOURS.length];
      if (!groups.has(colour)) groups.set(colour, []);
      groups.get(colour).push(block);
    } else if (state.published[block]) {
      const age = Math.max(0, state.numPlans - state.since[block]);
      cached[Math.min(3, Math.floor(Math.log2(age + 1) / 3))].push(block);
    } else {
      context.rect((block % columns) * size + 0.5, Math.floor(block / columns) * size + 0.5, inner - 1, inner - 1);
    }
  }
  context.stroke();
  for (const [colour, blocks] of groups) {
    context.fillStyle = colour;
    fillBlocks(context, blocks, columns, size, inner);
  }
  context.fillStyle = hatch(context, ink.muted, ink.panel);
  cached.forEach((blocks, age) => {
    context.globalAlpha = 1 - 0.2 * age;
    fillBlocks(context, blocks, columns, size, inner);
  });
  context.globalAlpha = 1;
  drawMarks(context, film, state, at, mine, owner, size, place, ink);
  return { size, columns, owner };
}

// Fills ascending blocks at once. Small squares have no gap, so neighbours in a line are one rectangle.
function fillBlocks(context, blocks, columns, size, inner) {
  context.beginPath();
  for (let i = 0; i < blocks.length; i++) {
    const column = blocks[i] % columns;
    let count = 1;
    while (inner === size && i + 1 < blocks.length && blocks[i + 1] === blocks[i] + 1 && column + count < columns) {
      count++;
      i++;
    }
    context.rect(column * size, Math.floor(blocks[i] / columns) * size, (count - 1) * size + inner, inner);
  }
  context.fill();
}

function drawMarks(context, film, state, at, mine, owner, size, place, ink) {
  context.textAlign = "center";
  const ring = Math.max(1, size / 8);
  for (let block = 0; block < state.numBlocks; block++) {
    if (!state.refs[block]) continue;
    const [x, y] = place(block);
    if (state.refs[block] > 1) {
      context.strokeStyle = ink.strong;
      context.lineWidth = ring;
      context.strokeRect(x + ring / 2, y + ring / 2, size - 1 - ring, size - 1 - ring);
    }
    if (size >= 15) {
      context.fillStyle = "#000";
      context.font = state.refs[block] > 1 ? "bold 10px system-ui, sans-serif" : "10px system-ui, sans-serif";
      context.fillText(state.refs[block] > 1 ? `×${state.refs[block]}` : film.label(owner[block]), x + size / 2, y + size / 2);
    }
  }
  if (state.next !== null) {
    const [x, y] = place(state.next);
    context.setLineDash([3, 2]);
    context.strokeStyle = ink.strong;
    context.lineWidth = 1.5;
    context.strokeRect(x + 0.5, y + 0.5, size - 2, size - 2);
    context.setLineDash([]);
  }
  const centre = (block) => place(block).map((each) => each + size / 2);
  const table = state.tables.get(mine);
  if (table) {
    context.strokeStyle = ink.strong;
    context.lineWidth = 1;
    context.globalAlpha = 0.45;
    context.beginPath();
    table.forEach((block, i) => context[i ? "lineTo" : "moveTo"](...centre(block)));
    context.stroke();
    context.globalAlpha = 1;
    context.lineWidth = 2;
    for (const block of table) {
      const [x, y] = place(block);
      context.strokeRect(x + 0.5, y + 0.5, size - 2, size - 2);
    }
  }
  const line = at < film.frames.length ? film.lines[film.frames[at].line] : {};
  for (const [source, target] of line.copies || []) drawArrow(context, centre(source), centre(target), ink.strong);
}

function drawArrow(context, from, to, colour) {
  const angle = Math.atan2(to[1] - from[1], to[0] - from[0]);
  context.strokeStyle = context.fillStyle = colour;
  context.lineWidth = 2.5;
  context.beginPath();
  context.moveTo(...from);
  context.lineTo(...to);
  context.stroke();
  context.beginPath();
  context.moveTo(...to);
  for (const turn of [-0.4, 0.4]) context.lineTo(to[0] - 9 * Math.cos(angle + turn), to[1] - 9 * Math.sin(angle + turn));
  context.fill();
}
