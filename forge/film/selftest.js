// The self-test, at #selftest: compares the fold with what the engine was, and writes JSON to the page.

function canonicalState(film, at) {
  const state = film.seek(at);
  const used = [], cached = [];
  for (let block = 0; block < state.numBlocks; block++) {
    if (state.refs[block]) used.push(block);
    else if (state.published[block]) cached.push(block);
  }
  const tables = [...state.tables].sort((a, b) => a[0] - b[0]);
  return JSON.stringify({ tables, used, cached, waiting: state.waiting, next: state.next });
}

function selfTest(checks) {
  const film = page.films[0], result = { frames: film.length, states: 0, wrong: [], seek: 0, answers: [] };
  for (const { at, state, film: index = 0 } of checks.states || []) {
    result.states++;
    if (canonicalState(page.films[index], at) !== JSON.stringify(state)) result.wrong.push([index, at]);
  }
  const fresh = new Film(film.header);
  for (const line of film.lines) fresh.push(line);
  const played = [];
  for (let at = 0; at <= fresh.length; at++) if (at % 37 === 0 || at === fresh.length) played.push([at, canonicalState(fresh, at)]);
  for (const [at, state] of played.reverse()) if (canonicalState(film, at) !== state) result.seek++;
  for (const { at, name, value } of checks.figures || []) {
    const us = film.timeOf(at), { ttft, itl } = film.latencies(us), total = at < film.length ? film.frames[at].total : film.total;
    const found = { ttft_p50: quantile(ttft, 0.5), ttft_p99: quantile(ttft, 0.99), itl_p50: quantile(itl, 0.5), itl_p99: quantile(itl, 0.99), ...total }[name];
    result.answers.push({ name, value, found });
  }
  for (const { at, key, shift, to, says, seq, waits } of checks.presets || []) {
    go(at);
    if (seq !== undefined) choose(seq);
    if (key) document.body.dispatchEvent(new KeyboardEvent("keydown", { key, shiftKey: Boolean(shift), bubbles: true }));
    const text = page.views[0].find(".status").textContent, reasons = waitReasons(film, page.at).queue;
    const isRight = (to === undefined || page.at === to) && (says === undefined || text.includes(says))
      && (waits === undefined || reasons.some((each) => each.seq === waits[0] && each.why === waits[1]));
    result.answers.push({ name: `preset at ${at}`, value: true, found: isRight, text, at: page.at });
  }
  result.ms = measureDrawing();
  result.errors = page.errors;
  result.violations = page.violations;
  result.requests = performance.getEntriesByType("resource").length;
  return result;
}

// Milliseconds a frame of all drawings: of frames that follow each other, and of those all over the film.
function measureDrawing() {
  const middle = Math.floor(filmNow().length / 2), measure = (positions) => {
    const times = positions.map((at) => {
      page.at = Math.min(filmNow().length, at);
      const before = performance.now();
      draw();
      document.getElementById("strip").getContext("2d").getImageData(0, 0, 1, 1);
      return performance.now() - before;
    });
    return quantile(Float64Array.from(times).sort(), 0.5);
  };
  const steps = Array.from({ length: 40 }, (_, i) => i);
  measure(steps); // code that has not run yet is slower
  return { play: measure(steps.map((i) => middle + i)), jump: measure(steps.map((i) => Math.floor((i / 39) * filmNow().length))) };
}

window.addEventListener("error", (event) => page.errors.push(String(event.message)));
document.addEventListener("securitypolicyviolation", (event) => page.violations.push(event.violatedDirective));

function writeSelfTest(result) {
  const output = document.createElement("pre");
  output.id = "selftest";
  output.textContent = JSON.stringify(result);
  document.body.append(output);
}
