"""transformers as a peer: its continuous batching on a shape with random weights.

Owns the calls of its generate_batch, and the figures of the throughput cells on it.

    cells ─► TransformersPeer ─► generate_batch, paged attention ─► {c1_tok_s, c8_tok_s, ...}
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

from forge.bench.peer import measure_peer_throughput, read_vocab_size, set_environment
from forge.bench.shapes import write_shape
from forge.bench.workload import BatchCell, Cells, prompt_id_range
from forge.errors import InvalidConfig, RequestFailed

TRANSFORMERS_CELLS = ("c1", "c8", "c64")
"""Default cells of transformers: each takes up to half a minute on a GPU."""

WARM_UP_TOKENS = 8
"""Output tokens of the warm-up round before each cell of transformers."""


class TransformersPeer:
    """transformers' continuous batching, on a shape with random weights, until the process ends.

    bfloat16 on a CUDA device, float32 on a CPU. One cache is kept for all batches. It has room for
    twice the largest of `batches`, because the scheduler delays prompts when blocks are scarce. The
    defaults of transformers decide the rest, such as the capture of steps in CUDA graphs.

    attention   a paged implementation, such as paged|sdpa or paged|flash_attention_2
    extra       fields of its ContinuousBatchingConfig
    """

    def __init__(
        self, shape: str, root: str, batches: Sequence[BatchCell], attention: str, **extra: Any
    ) -> None:
        set_environment()
        folder = str(write_shape(shape, root))
        try:
            import torch
            import transformers

            batching = transformers.ContinuousBatchingConfig
            device = "cuda" if torch.cuda.is_available() else "cpu"
            if device == "cpu" and find_spec("psutil") is None:
                raise ImportError("psutil is not installed")  # it reads the free memory
        except (ImportError, AttributeError) as missing:
            raise InvalidConfig(
                "transformers", f"{missing}", "pip install 'transformers>=5.17,<5.24' torch psutil"
            ) from None
        with torch.device(device):
            self._model = transformers.AutoModelForCausalLM.from_config(
                transformers.AutoConfig.from_pretrained(folder),
                dtype=torch.bfloat16 if device == "cuda" else torch.float32,
                attn_implementation=attention,
            ).eval()
        # No token has this id, so no token ends a request.
        self._generation_config = transformers.GenerationConfig(do_sample=False, eos_token_id=-1)
        size = extra.get("block_size", 256)
        blocks = [b.requests * ((b.input[1] + b.output[1]) // size + 1) for b in batches]
        options: dict[str, Any] = {
            "block_size": size,
            "num_blocks": 2 * max(blocks),
            "max_batch_tokens": 8192,
            "max_requests_per_batch": max(batch.requests for batch in batches),
            "allow_block_sharing": False,
        }
        self._batching_config = batching(**{**options, **extra})
        self.ids = prompt_id_range(read_vocab_size(folder))

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run all prompts, sent at once. Returns seconds until the last has ended, and tokens.

        All prompts have one output length, as generate_batch requires. The seconds are those of its
        own timestamps, from the arrival of the first request: its thread start and stop do not
        count. Raises RequestFailed.
        """
        (output,) = {output for _, output in work}
        outputs = self._model.generate_batch(
            [prompt for prompt, _ in work],
            generation_config=self._generation_config,
            continuous_batching_config=self._batching_config,
            persistent_manager=True,
            max_new_tokens=output,
        )
        if failed := [each.error for each in outputs.values() if each.error is not None]:
            raise RequestFailed(failed[0])
        lengths = [len(each.generated_tokens) for each in outputs.values()]
        assert lengths == [output] * len(work), f"{lengths} tokens came"
        spans = [(each.created_time, each.lifespan[1]) for each in outputs.values()]
        return max(end for _, end in spans) - min(start for start, _ in spans), sum(lengths)


def measure_transformers(
    shape: str, cells: Cells, root: str, attention: str, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the throughput cells, one round each after a warm-up. Raises InvalidConfig for others.

    There is no start time: the cache is created with the first batch, and nothing is compiled.
    """
    batches = cells.throughput
    if unsupported := set(cells.names) - {batch.name for batch in batches}:
        raise InvalidConfig(
            "cells",
            f"{', '.join(sorted(unsupported))} cannot be run on transformers",
            "Name throughput cells, such as c1,c8,c64",
        )
    peer = TransformersPeer(shape, root, batches, attention, **extra)
    figures: dict[str, Any] = {"engine": "transformers", "shape": shape, "attention": attention}
    for batch in batches:
        few = (min(WARM_UP_TOKENS, batch.output[0]),) * 2
        measure_peer_throughput(peer, batch._replace(output=few), 1, cells.seed + 1)
        figures[f"{batch.name}_tok_s"] = measure_peer_throughput(peer, batch, 1, cells.seed)
    return figures
