"""Films: a run of the engine as lines of JSON, and the page that draws them.

Engine ──Recorder──► FilmRecorder ──line──► file or page
                                      └──► FilmState: the pool's tables, folded from the lines
"""
