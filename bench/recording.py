"""Cost of recording: the same batches with a recorder and without, on one model.

Owns the figures of `python -m forge.bench.recording`. Runs alternate, since the clock of a GPU
drifts: each run with a recorder is compared with the adjacent run without. The last recording is
replayed at once, and has to give the same decisions.

    python -m forge.bench.recording qwen3-4b [--streams 1,64,256] [--repeats 5] [--json FILE]

    plain  recorded  recorded  plain  plain  recorded ...      the order within a pair alternates
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from forge.bench.engine_driver import EngineDriver, defaults, open_llm
from forge.bench.result_file import create_result, write_json
from forge.bench.workload import BatchCell, Cells, draw_batch, prompt_id_range
from forge.engine import Engine
from forge.recording import RecordingWriter, build_header
from forge.sim.replay import replay
from forge.version import VERSION

STREAMS, INPUT, OUTPUT = "1,64,256", 200, 384


def measure_plain(engine: Engine, batch: BatchCell, seed: int) -> float:
    """Return output tokens a second."""
    drive = EngineDriver(engine)
    ids = prompt_id_range(engine.model.vocab_size())
    seconds, tokens = drive.run_batch(draw_batch(random.Random(seed), batch, ids))
    return tokens / seconds


def measure_recorded(engine: Engine, batch: BatchCell, seed: int, path: Path) -> float:
    """Return output tokens a second of an equal engine that records its decisions to the file."""
    model, config = engine.model, engine.config
    with path.open("w", encoding="utf-8", buffering=2**20) as file:
        header = build_header(config, model.vocab_size(), model.eos_token(), "fcfs", VERSION)
        with closing(RecordingWriter(file.write, time.perf_counter_ns, header)) as recorder:
            return measure_plain(Engine(model, config, recorder=recorder), batch, seed)


def measure_level(engine: Engine, streams: int, repeats: int, path: Path) -> dict[str, Any]:
    """Return ratios at one number of streams, the size of a recording and its replay."""
    batch = BatchCell("", streams, (INPUT, INPUT), (OUTPUT, OUTPUT))
    measure_plain(engine, batch, 0)
    measure_recorded(engine, batch, 0, path)
    plain, recorded = [], []
    for seed in range(repeats):
        for with_recorder in (seed % 2 == 0, seed % 2 == 1):
            if with_recorder:
                recorded.append(measure_recorded(engine, batch, seed, path))
            else:
                plain.append(measure_plain(engine, batch, seed))
    with path.open(encoding="utf-8") as file:
        replayed = replay(file)
    ratios = sorted(a / b for a, b in zip(recorded, plain, strict=True))
    return {
        "streams": streams,
        "plain_tok_s": round(median(plain)),
        "tape_tok_s": round(median(recorded)),
        "ratio": round(median(ratios), 4),
        "ratio_range": [round(ratios[0], 4), round(ratios[-1], 4)],
        "bytes_per_token": round(path.stat().st_size / (streams * OUTPUT), 1),
        "replayed_steps": replayed.steps,
        "difference": replayed.difference,
    }


def main() -> None:
    """Measure, print, and write the record where `--json` names a file."""
    parser = argparse.ArgumentParser(
        "python -m forge.bench.recording", description=__doc__.split("\n")[0]
    )
    parser.add_argument("model", help="a shape's name, a checkpoint or an embedded model")
    parser.add_argument("--streams", default=STREAMS, metavar="N,N")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", metavar="FILE", help="write the figures to FILE")
    arguments = parser.parse_args()
    options = defaults(arguments.model, Cells.read())
    with (
        tempfile.TemporaryDirectory() as folder,
        open_llm(arguments.model, options) as (llm, shape, _),
    ):
        path = Path(folder) / "recording.jsonl"
        levels = [
            measure_level(llm.engine, int(streams), arguments.repeats, path)
            for streams in arguments.streams.split(",")
        ]
    for each in levels:
        print(each)
    if arguments.json is not None:
        write_json(arguments.json, create_result("tape", {"shape": shape, "levels": levels}))


if __name__ == "__main__":
    main()
