"use strict";
// The fold of a film's lines, as forge/film/state.py has it, and an index of its plans. No decision is made here.

const PROMPT = 0, DECODE = 1, DRAFTS = 2, AGAIN = 3;
const SNAPSHOT_PLANS = 256;

class State {
  constructor(header) {
    this.numBlocks = header.blocks;
    this.next = header.next;
    this.host = 0;
    this.disk = 0;
    this.wait = null;
    this.planIds = [];
    this.tables = new Map();
    this.numTokens = new Map();
    this.slots = new Map();
    this.live = new Map(); // sequence -> [request, choice, class, prompt, output]
    this.epochs = new Map();
    this.published = new Uint8Array(header.blocks);
    this.refs = new Int32Array(header.blocks);
    this.since = new Int32Array(header.blocks); // plan at which the last table left the block
    this.numPlans = 0;
  }

  clone() {
    const copy = Object.create(State.prototype);
    Object.assign(copy, this);
    copy.planIds = this.planIds.slice();
    copy.tables = new Map([...this.tables].map(([s, blocks]) => [s, blocks.slice()]));
    for (const name of ["numTokens", "slots", "live", "epochs"]) copy[name] = new Map(this[name]);
    for (const name of ["published", "refs", "since"]) copy[name] = this[name].slice();
    return copy;
  }

  get waiting() {
    const queue = [...this.live.keys()].filter((s) => !this.tables.has(s));
    const key = (s) => [this.live.get(s)[2], this.epochs.get(s) ? 0 : 1, s];
    return queue.map(key).sort((a, b) => a[0] - b[0] || a[1] - b[1] || a[2] - b[2]).map((each) => each[2]);
  }

  apply(line) {
    if (line.key) return this.load(line.key);
    if ("arrive" in line) {
      for (let choice = 0; choice < line.n; choice++) {
        const facts = [line.arrive, choice, line.class || 0, line.prompt, line.output];
        this.live.set(line.seq + choice, facts);
        this.epochs.set(line.seq + choice, 0);
      }
    } else if (line.resize) {
      if (line.resize[0] !== null) this.resize(line.resize[0]);
    } else if (line.reset) {
      this.published.fill(0);
    }
    for (const [seq] of line.ended || []) {
      this.live.delete(seq);
      this.epochs.delete(seq);
    }
    for (const seq of line.free || []) this.free(seq);
    if ("plan" in line) this.applyRows(line);
    for (const [seq, numTokens, ...blocks] of line.open || []) {
      this.tables.set(seq, blocks);
      this.numTokens.set(seq, numTokens);
      this.hold(blocks);
    }
    for (const [seq, keep, ...blocks] of line.grow || []) {
      const table = this.tables.get(seq);
      this.drop(table.splice(keep));
      table.push(...blocks);
      this.hold(blocks);
    }
    for (const [seq, numTokens] of line.tokens || []) this.numTokens.set(seq, numTokens);
    for (const block of line.evict || []) this.published[block] = 0;
    for (const block of line.publish || []) this.published[block] = 1;
    for (const name of ["next", "wait", "host", "disk"]) if (name in line) this[name] = line[name];
  }

  applyRows(line) {
    this.numPlans++;
    for (const row of line.rows || this.planIds) {
      if (typeof row === "number") {
        this.numTokens.set(row, this.numTokens.get(row) + 1);
      } else {
        this.slots.set(row[0], row[1]);
        this.numTokens.set(row[0], row[2] + row[3]);
      }
    }
    if (line.rows) this.planIds = line.rows.map((row) => (typeof row === "number" ? row : row[0]));
  }

  hold(blocks) {
    for (const block of blocks) this.refs[block]++;
  }

  drop(blocks) {
    for (const block of blocks) if (--this.refs[block] === 0) this.since[block] = this.numPlans;
  }

  free(seq) {
    this.drop(this.tables.get(seq) || []); // a table that came and went between two lines
    this.tables.delete(seq);
    this.numTokens.delete(seq);
    this.slots.delete(seq);
    if (this.live.has(seq)) this.epochs.set(seq, this.epochs.get(seq) + 1);
  }

  resize(numBlocks) {
    for (const name of ["published", "refs", "since"]) {
      const before = this[name];
      this[name] = new before.constructor(numBlocks);
      this[name].set(before.subarray(0, numBlocks));
    }
    this.numBlocks = numBlocks;
  }

  load(key) {
    this.resize(key.blocks);
    this.refs.fill(0);
    this.published.fill(0);
    this.tables = new Map(key.tables.map(([s, , ...blocks]) => [s, blocks]));
    for (const blocks of this.tables.values()) this.hold(blocks);
    this.numTokens = new Map(key.tables.map(([s, numTokens]) => [s, numTokens]));
    this.slots = new Map(key.slots);
    this.live = new Map(key.live.map(([s, , ...facts]) => [s, facts]));
    this.epochs = new Map(key.live.map(([s, epoch]) => [s, epoch]));
    for (const block of key.published) this.published[block] = 1;
    this.planIds = key.rows.slice();
    Object.assign(this, { next: key.next, wait: key.wait, host: key.host, disk: key.disk });
  }

  counts() {
    let used = 0, cached = 0;
    for (let block = 0; block < this.numBlocks; block++) {
      if (this.refs[block]) used++;
      else if (this.published[block]) cached++;
    }
    return { used, cached, empty: this.numBlocks - used - cached };
  }
}

// A film: its lines, a frame for each plan, and the requests. Lines may be added at any time.
class Film {
  constructor(header) {
    this.header = header;
    this.isLive = header.clock === "live"; // its lines have totals, and may be of several steps
    this.lines = [];
    this.frames = [];
    this.requests = new Map();
    this.requestOf = new Map(); // sequence -> [request, choice]
    this.refusals = [];
    this.endUs = 0;
    this.lastDoneUs = 0;
    this.usedSlots = 1;
    this.snapshots = [];
    this.byStep = new Map();
    this.total = { preempted: 0, evicted: 0, copies: 0, again: 0, drafts: 0, kept: 0, output: 0, limits: {} };
    this.indexed = new State(header);
    this.cursor = { at: -1, state: this.indexed.clone() };
  }

  push(line) {
    const state = this.indexed;
    this.lines.push(line);
    if (line.key) {
      if (this.lines.length === 1) state.apply(line);
      this.adopt(line.key);
      this.baseTotals ??= line.totals;
      return;
    }
    if (line.at !== undefined) this.endUs = Math.max(this.endUs, line.at);
    if ("arrive" in line) this.arrive(line);
    if ("refused" in line) this.refusals.push(line);
    if (line.totals) this.addTotals(line.totals);
    const starts = "plan" in line ? this.starts(line) : null;
    state.apply(line);
    if (starts) this.addFrame(line, starts);
    if ("done" in line) this.commit(line);
    for (const [seq, why] of line.ended || []) {
      const request = this.requests.get(this.requestOf.get(seq)[0]);
      request.ended.push([line.at, why]);
    }
  }

  adopt(key) {
    for (const [seq, , request, choice, , prompt, output] of key.live) {
      if (this.requestOf.has(seq)) continue;
      if (!this.requests.has(request)) {
        this.requests.set(request, { id: request, at: null, prompt, output, n: 1, first: seq, times: [], ended: [] });
      }
      this.requestOf.set(seq, [request, choice]);
    }
  }

  arrive(line) {
    const { arrive: id, at, prompt, output, n, seq } = line;
    this.requests.set(id, { id, at, prompt, output, n, first: seq, times: [], ended: [] });
    for (let choice = 0; choice < n; choice++) this.requestOf.set(seq + choice, [id, choice]);
  }

  // The first position of each row, which a row of one number leaves out.
  starts(line) {
    const freed = new Set(line.free || []);
    const rows = line.rows || this.indexed.planIds;
    return rows.map((row) => (typeof row === "number" && !freed.has(row) ? this.indexed.numTokens.get(row) : -1));
  }

  addFrame(line, starts) {
    const state = this.indexed, before = this.frames[this.frames.length - 1];
    const tokens = [0, 0, 0, 0];
    let rows = (line.rows || state.planIds).map((row, i) => {
      const plain = typeof row === "number";
      const seq = plain ? row : row[0];
      const [slot, start, n, drafts, samples] = plain ? [state.slots.get(seq), starts[i], 1, 0, 1] : row.slice(1);
      const prompt = state.live.get(seq)[3];
      let kind = state.epochs.get(seq) ? AGAIN : PROMPT;
      if (drafts) kind = DRAFTS;
      else if (samples === 1 && n === 1 && start >= prompt) kind = DECODE;
      tokens[kind] += n;
      this.usedSlots = Math.max(this.usedSlots, slot + 1);
      return { seq, slot, n, drafts, samples, kind };
    });
    const isQuiet = !line.rows && tokens[DECODE] === rows.length;
    if (isQuiet && before && before.isDecode) rows = before.rows;
    const idle = [];
    if (state.tables.size !== rows.length) {
      const planned = new Set(rows.map((row) => row.seq));
      for (const [seq, slot] of state.slots) if (!planned.has(seq)) idle.push([seq, slot]);
    }
    const total = this.total;
    if (!this.isLive) this.countEvents(line);
    total.again += tokens[AGAIN];
    if (state.live.size) {
      const limit = state.wait ? state.wait[0] || "commit" : "none waits";
      total.limits = { ...total.limits, [limit]: (total.limits[limit] || 0) + 1 };
    }
    const frame = {
      line: this.lines.length - 1, step: line.plan, at: line.at, begin: line.at, end: null, done: null, launched: null,
      rows, idle, tokens, isDecode: tokens[DECODE] === rows.length, kept: null, total: { ...total },
    };
    this.byStep.set(line.plan, frame);
    this.frames.push(frame);
    if (this.frames.length % SNAPSHOT_PLANS === 1) this.snapshots.push(state.clone());
  }

  countEvents(line) {
    this.total.preempted += (line.preempted || []).length;
    this.total.evicted += (line.evict || []).length;
    this.total.copies += (line.copies || []).length;
  }

  // Sets the figures of a live film to those since its first line.
  addTotals(totals) {
    ["preempted", "evicted", "copies", "drafts", "kept", "output"].forEach((name, i) => {
      this.total[name] = totals[i] - this.baseTotals[i];
    });
  }

  commit(line) {
    const frame = this.byStep.get(line.done);
    if (!frame) return;
    this.byStep.delete(line.done);
    const [launched, begin, end] = line.device || [null, Math.max(0, this.lastDoneUs - frame.at), line.at - frame.at];
    frame.launched = launched === null ? null : frame.at + launched;
    frame.begin = frame.at + begin;
    frame.end = frame.at + end;
    frame.done = this.lastDoneUs = line.at;
    const kept = new Map(line.kept || []), gained = new Map(line.gained || []);
    if (line.kept) frame.kept = kept;
    if (this.isLive) return;
    for (const row of frame.rows) {
      let count = row.samples ? (row.drafts ? (kept.get(row.seq) || 0) + 1 : 1) : 0;
      if (gained.has(row.seq)) count = gained.get(row.seq);
      if (row.drafts) {
        this.total.drafts += row.drafts;
        this.total.kept += kept.get(row.seq) || 0;
      }
      this.total.output += count;
      const request = this.requests.get(this.requestOf.get(row.seq)[0]);
      for (let i = 0; i < count; i++) request.times.push(line.at);
    }
  }

  get length() {
    return this.frames.length;
  }

  // The state after the plan of frame `at`; the state at the end of the film for `at` = length.
  seek(at) {
    const cursor = this.cursor;
    const target = at < this.frames.length ? this.frames[at].line : this.lines.length - 1;
    const index = Math.floor(Math.min(at, this.frames.length - 1) / SNAPSHOT_PLANS);
    let from = cursor.at < 0 ? -1 : cursor.line;
    if (cursor.at < 0 || from > target || (index >= 0 && from < this.frames[index * SNAPSHOT_PLANS].line)) {
      if (index >= 0) {
        cursor.state = this.snapshots[index].clone();
        from = this.frames[index * SNAPSHOT_PLANS].line;
      } else {
        cursor.state = new State(this.header);
        from = -1;
      }
    }
    for (let i = from + 1; i <= target; i++) if (!this.lines[i].key || i === 0) cursor.state.apply(this.lines[i]);
    cursor.at = at;
    cursor.line = target;
    return cursor.state;
  }

  timeOf(at) {
    return at < this.frames.length ? this.frames[at].at : this.endUs;
  }

  // The last frame that was planned by this time; 0 before the first.
  frameAt(us) {
    let low = 0, high = this.frames.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (this.frames[middle].at <= us) low = middle + 1;
      else high = middle;
    }
    return Math.max(0, low - 1);
  }

  // The lines after the plan before, up to the plan of this frame.
  linesOf(at) {
    const first = at > 0 && this.frames.length ? this.frames[at - 1].line + 1 : 0;
    return this.lines.slice(first, at < this.frames.length ? this.frames[at].line + 1 : undefined);
  }

  // The next frame after `at` whose lines satisfy `test`, in the direction; `at` where there is none.
  find(at, direction, test) {
    for (let i = at + direction; i >= 0 && i <= this.frames.length; i += direction) {
      if (this.linesOf(i).some(test)) return i;
    }
    return at;
  }

  // Times to the first token and between tokens, in microseconds, of tokens that came by `us`.
  latencies(us) {
    const ttft = [], itl = [];
    for (const request of this.requests.values()) {
      const times = request.times;
      if (request.at === null || !times.length || times[0] > us) continue;
      ttft.push(times[0] - request.at);
      for (let i = 1; i < times.length && times[i] <= us; i++) itl.push(times[i] - times[i - 1]);
    }
    return { ttft: Float64Array.from(ttft).sort(), itl: Float64Array.from(itl).sort() };
  }

  label(seq) {
    const [request, choice] = this.requestOf.get(seq) || [seq, 0];
    return this.requests.get(request)?.n > 1 ? `${request}.${choice}` : `${request}`;
  }
}

function quantile(sorted, share) {
  return sorted.length ? sorted[Math.max(0, Math.ceil(share * sorted.length) - 1)] : NaN;
}

function parseFilm(text) {
  const [header, ...lines] = text.trim().split("\n").map((line) => JSON.parse(line));
  const film = new Film(header);
  for (const line of lines) film.push(line);
  return film;
}
