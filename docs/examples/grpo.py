"""A trainer: groups of outputs of a served policy, rewards, one step, and the new weights go back.

    POST /generate, one seed each ─► rewards ─► advantages in the group ─► one step of AdamW
              ▲                                                                    │
              └──── POST /admin/weights ◄───── step-3/model.safetensors ◄──────────┘

GRPO (Shao et al. 2024) without its clip and its reference model: each group is used for one step.
The task is to write the letter of `--letter` often. Needs torch and transformers, and a server:

    FORGE_ADMIN_KEY=... forge serve tiny --weights-folder weights
    FORGE_ADMIN_KEY=... python docs/examples/grpo.py --model forge/models/tiny
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from urllib.request import Request, urlopen

import torch
from safetensors.torch import save_file
from torch.nn.functional import log_softmax
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM

TIMEOUT_S = 120


class Rollout(NamedTuple):
    """An output of the policy, with the version of the weights that it is of."""

    token_ids: list[int]
    text: str
    weight_version: str


class Server:
    """A server of the policy, as a trainer uses it."""

    def __init__(self, url: str, admin_key: str, api_key: str | None = None) -> None:
        self._url = url
        self._admin_key = admin_key
        self._api_key = api_key

    def tokenize(self, prompt: str) -> list[int]:
        """Return the ids that the server makes of a prompt."""
        tokens: list[int] = self._post("/tokenize", {"prompt": prompt}, self._api_key)["tokens"]
        return tokens

    def sample(self, prompt: str, max_tokens: int, seed: int) -> Rollout:
        """Return an output at temperature 1, which the seed repeats."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "seed": seed, "temperature": 1.0}
        answer = self._post("/generate", body, self._api_key)
        # The weights that the server started with have version 0.
        return Rollout(answer["token_ids"], answer["text"], answer.get("weight_version", "0"))

    def update_weights(self, file: str, version: str) -> None:
        """Let the server read new weights; it returns when every later token is of them."""
        body = {"files": [file], "weight_version": version}
        self._post("/admin/weights", body, self._admin_key)

    def _post(self, path: str, body: dict[str, Any], key: str | None) -> Any:
        headers = {"content-type": "application/json"}
        if key is not None:
            headers["authorization"] = f"Bearer {key}"
        request = Request(self._url + path, json.dumps(body).encode(), headers)
        with urlopen(request, timeout=TIMEOUT_S) as response:
            return json.load(response)


def reward(text: str, letter: str) -> float:
    """Return the share of the letter in the text."""
    return text.count(letter) / max(1, len(text))


def group_advantages(rewards: Sequence[float]) -> torch.Tensor:
    """Return how much better each output is than its group, in standard deviations."""
    values = torch.tensor(rewards)
    return (values - values.mean()) / (values.std() + 1e-4)


def policy_loss(
    model: Any, prompt: list[int], rollouts: Sequence[Rollout], advantages: torch.Tensor
) -> torch.Tensor:
    """Return minus the mean log probability of the outputs' tokens, weighted by advantage."""
    outputs = [torch.tensor(rollout.token_ids) for rollout in rollouts]
    chosen = pad_sequence(outputs, batch_first=True)
    is_token = pad_sequence([torch.ones(len(each)) for each in outputs], batch_first=True)
    ids = torch.cat([torch.tensor([prompt] * len(rollouts)), chosen], dim=1)
    # Padding comes last, so no token attends to it.
    logits = model(input_ids=ids[:, :-1]).logits[:, len(prompt) - 1 :]
    logprobs = log_softmax(logits.float(), dim=-1).gather(2, chosen[:, :, None])[:, :, 0]
    return -(logprobs * is_token * advantages[:, None]).sum() / is_token.sum()


def train(
    server: Server,
    model: Any,
    folder: Path,
    *,
    prompt: str,
    letter: str,
    num_steps: int,
    group_size: int,
    max_tokens: int,
    learning_rate: float,
) -> Iterator[float]:
    """Yield the mean reward of each step's group. The weights of a step are served after it.

    folder   that of the server's --weights-folder
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate)
    prompt_ids = server.tokenize(prompt)
    version = "0"
    for step in range(num_steps):
        seeds = range(step * group_size, (step + 1) * group_size)
        with ThreadPoolExecutor(group_size) as executor:  # They share the engine's steps.
            sample = partial(server.sample, prompt, max_tokens)
            rollouts = list(executor.map(sample, seeds))
        # Tokens of other weights would need importance weights.
        assert {rollout.weight_version for rollout in rollouts} == {version}
        rewards = [reward(rollout.text, letter) for rollout in rollouts]
        loss = policy_loss(model, prompt_ids, rollouts, group_advantages(rewards))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        version = f"step-{step + 1}"
        write_weights(model, folder / version / "model.safetensors")
        server.update_weights(f"{version}/model.safetensors", version)
        yield sum(rewards) / group_size


def write_weights(model: Any, path: Path) -> None:
    """Write the model's tensors by their names, each once: tied ones have one name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.detach() for name, tensor in model.named_parameters()}, path)


def main() -> None:
    """Train, and print the mean reward of each step."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8080")
    parser.add_argument("--model", required=True, help="folder of the served checkpoint")
    parser.add_argument("--folder", type=Path, default=Path("weights"))
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--letter", default="e")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    args = parser.parse_args()
    server = Server(args.url, os.environ["FORGE_ADMIN_KEY"], os.environ.get("FORGE_API_KEY"))
    model = AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32)
    rewards = train(
        server,
        model,
        args.folder,
        prompt=args.prompt,
        letter=args.letter,
        num_steps=args.steps,
        group_size=args.group,
        max_tokens=args.tokens,
        learning_rate=args.learning_rate,
    )
    for step, mean_reward in enumerate(rewards):
        print(f"step {step:3}  mean reward {mean_reward:.3f}", flush=True)


if __name__ == "__main__":
    main()
