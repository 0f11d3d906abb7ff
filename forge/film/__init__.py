"""Films: a run of the engine as lines of JSON, and the page that draws them.

Engine ──Recorder──► FilmRecorder ──line──► file or page
Engine ──Recorder──► LiveFilm ──line──► report of a step ──► page at /
                                      └──► FilmState: the pool's tables, folded from the lines
"""
