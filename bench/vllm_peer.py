"""vLLM as a peer: its LLM on a shape with random weights, and its step loop.

Owns the calls of vLLM's Python API. Knows no cell.

    VLLMPeer ─┬─ run_batch     greedy requests, sent at once
              ├─ generate      LLM.generate with any parameters, text included
              └─ step_loop ─► VLLMStepLoop.submit, step     for closed loops
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from forge.bench.peer import read_vocab_size, set_environment
from forge.bench.shapes import model_folder
from forge.bench.workload import prompt_id_range
from forge.errors import InvalidConfig, RequestFailed


class VLLMPeer:
    """vLLM on a shape or a folder with random weights, open until the process ends.

    start_s   seconds of the start, imports included
    ids       range of the token ids of prompts, half-open
    """

    def __init__(self, shape: str, root: str, **extra: Any) -> None:
        set_environment()
        folder = model_folder(shape, root)
        start = time.perf_counter()  # imports are part of the start, as they are for forge
        try:
            from vllm import LLM, SamplingParams
            from vllm.sampling_params import RequestOutputKind
        except ModuleNotFoundError as missing:
            raise InvalidConfig(
                "vllm", f"{missing.name} is not installed", "Run this where vLLM is"
            ) from None
        options: dict[str, Any] = {
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "max_model_len": 8192,
            "gpu_memory_utilization": 0.85,
            "enable_prefix_caching": False,
            "disable_log_stats": True,
            "max_num_seqs": 256,
        }
        self._llm = LLM(model=folder, **{**options, **extra})
        self.start_s = round(time.perf_counter() - start, 1)
        self._params = SamplingParams
        self._each_step = RequestOutputKind.DELTA
        self.ids = prompt_id_range(read_vocab_size(folder))

    def greedy_params(self, output: int, **extra: Any) -> Any:
        """Return parameters for exactly `output` greedy tokens, as ids."""
        return self._params(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False, **extra
        )

    def create_params(self, fields: Mapping[str, Any], output: int) -> Any:
        """Return parameters with these fields for exactly `output` tokens, as text and ids."""
        values = dict(fields)
        if (structure := values.pop("structured_outputs", None)) is not None:
            from vllm.sampling_params import StructuredOutputsParams

            values["structured_outputs"] = StructuredOutputsParams(**structure)
        return self._params(max_tokens=output, ignore_eos=True, **values)

    def run_outputs(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[Any]:
        """Return vLLM's RequestOutput of each prompt. All prompts are sent at once."""
        entries = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs: list[Any] = self._llm.generate(entries, list(params), use_tqdm=False)
        return outputs

    def generate(self, prompts: Sequence[list[int]], params: Sequence[Any]) -> list[list[int]]:
        """Return the output ids of each prompt. All prompts are sent at once."""
        return [list(each.outputs[0].token_ids) for each in self.run_outputs(prompts, params)]

    def counter(self, name: str, labels: Mapping[str, str]) -> int | None:
        """Return the value of a counter with these labels, or None where vLLM has none.

        It needs `disable_log_stats=False`.
        """
        values = [
            each.value
            for each in self._llm.get_metrics()
            if each.name == name and labels.items() <= each.labels.items()
        ]
        return sum(values) if values else None

    def run_batch(self, work: Sequence[tuple[list[int], int]]) -> tuple[float, int]:
        """Run (prompt, output tokens) pairs, sent at once.

        Returns seconds until the end, and tokens.
        """
        params = [self.greedy_params(output) for _, output in work]
        start = time.perf_counter()
        outputs = self.generate([prompt for prompt, _ in work], params)
        seconds = time.perf_counter() - start
        tokens = sum(map(len, outputs))
        assert tokens == sum(output for _, output in work), f"{tokens} tokens came"
        return seconds, tokens

    def step_loop(self) -> VLLMStepLoop:
        """Return the engine's step loop."""
        return VLLMStepLoop(
            self._llm.llm_engine,
            lambda output: self.greedy_params(output, output_kind=self._each_step),
        )

    def measure_median_ttft_ms(self, prompts: Sequence[list[int]]) -> float:
        """Return the median time to the first token of the prompts, run one after the other."""
        times = [self.run_batch([(prompt, 1)])[0] for prompt in prompts]
        return round(statistics.median(times) * 1e3, 3)


class VLLMStepLoop:
    """The step loop of a vLLM engine.

    params   output tokens -> parameters with which each step reports only its new tokens
    """

    def __init__(self, engine: Any, params: Callable[[int], Any]) -> None:
        self._engine = engine
        self._params = params
        self._request_counter = count()
        self._num_remaining: dict[str, int] = {}

    def submit(self, prompt: Sequence[int], output: int) -> str:
        """Submit a request. Returns its name."""
        name = f"closed-{next(self._request_counter)}"
        self._num_remaining[name] = output
        # With a type, a prompt takes the same path as those of LLM.generate.
        ids = {"type": "token", "prompt_token_ids": list(prompt)}
        self._engine.add_request(name, ids, self._params(output))
        return name

    def step(self) -> dict[str, int]:
        """Run one step. Returns the new tokens of each request.

        Raises RequestFailed where a request ends with the wrong number of tokens.
        """
        num_tokens_by_request: dict[str, int] = {}
        for output in self._engine.step():
            name, tokens = output.request_id, len(output.outputs[0].token_ids)
            remaining = self._num_remaining[name] = self._num_remaining[name] - tokens
            if remaining < 0 or (remaining and output.finished):
                raise RequestFailed(f"vLLM's request {name} ended with {remaining} tokens due")
            if tokens:
                num_tokens_by_request[name] = num_tokens_by_request.get(name, 0) + tokens
        return num_tokens_by_request
