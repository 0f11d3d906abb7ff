// A page that reads its film from the server while it is made.

const MAX_LIVE_FRAMES = 5000; // then the page begins again with a new keyframe
const live = { stop: null, film: null, beginUs: 0, drawing: false };

function say(text) {
  document.getElementById("connection").textContent = text;
}

// Reads the stream until it ends. The key is in the field alone; EventSource could not send it.
async function connect() {
  live.stop?.abort();
  const stop = live.stop = new AbortController(), key = document.getElementById("key").value;
  live.film = null;
  try {
    const response = await fetch("film", { headers: key ? { authorization: `Bearer ${key}` } : {}, cache: "no-store", signal: stop.signal });
    if (response.status === 401) return say("This server needs an API key.");
    if (!response.ok) return say(`The server answers ${response.status}: ${await response.text()}`);
    say("Connected: the page shows the engine as it runs. It follows at the end; a step back stops it.");
    const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
    let rest = "";
    for (;;) {
      const { value, done } = await reader.read();
      if (done) break;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) if (event.startsWith("data: ")) receive(JSON.parse(event.slice(6)));
      if (live.film?.length >= MAX_LIVE_FRAMES) return connect();
    }
  } catch (error) {
    if (!stop.signal.aborted) say(`The connection is lost: ${error.message}`);
  }
}

function receive(line) {
  if (line.film) {
    live.film = new Film(line);
    document.querySelector("h1").textContent = line.title;
    return;
  }
  if ("end" in line) return say(`The stream has ended: ${line.end}.`);
  const film = live.film;
  if (!film.lines.length) live.beginUs = line.at;
  line.at -= live.beginUs;
  const follows = page.films[0] !== film || page.at >= film.length, slots = film.usedSlots;
  film.push(line);
  film.usedSlots = Math.max(slots, film.usedSlots);
  if (page.films[0] !== film) start([film]);
  if (follows) page.at = film.length;
  if (live.drawing) return;
  live.drawing = true;
  requestAnimationFrame(drawLive);
}

function drawLive() {
  live.drawing = false;
  document.getElementById("slider").max = filmNow().length;
  if (filmNow().length < 200) page.spanUs = defaultSpan();
  draw();
}

listen();
document.getElementById("connect").addEventListener("click", connect);
document.getElementById("key").addEventListener("keydown", (event) => { if (event.key === "Enter") connect(); });
connect();
