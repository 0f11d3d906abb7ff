// A page that has its films in it.

start([...document.querySelectorAll("script.film-lines")].map((script) => parseFilm(script.textContent)));
listen();
if (location.hash === "#selftest") {
  const checks = document.getElementById("checks");
  writeSelfTest(selfTest(checks ? JSON.parse(checks.textContent) : {}));
}
