"""Trains the embedded pair, `tiny` and `tiny-draft`, from nothing: minutes on a GPU.

Owns the two shapes, the training and its log. Knows nothing of serving: what it writes are
checkpoints like any other. The text and the measures are those of bench.tiny.

    python -m bench.train_tiny [target] [draft] [--seed 0] [--device cuda] [--scale 1]
                               [--text FOLDER] [--folder forge/models]
                               [--json bench/results/tiny-training.json]

    text ─┬─► target ─► tiny          learns the text
          └───► draft ─► tiny_draft   learns what the target says of the same text
    each: short windows, then longer ones, the last as long as the models' contexts

The draft learns the target's whole distributions and no text (Hinton et al. 2015): its proposals
are kept where the two agree, right or wrong. Matrices are trained by Muon (Jordan et al. 2024),
which needs fewer steps than AdamW here; embeddings and norms by AdamW. On a CPU equal seeds and
versions give equal weights on one machine; elsewhere sums round otherwise. A CPU takes half a day;
`--scale 0.01` shows there that all works.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from bench.record import command_of, record, write
from bench.tiny import (
    FOLDERS,
    LONGEST,
    PARTS,
    VOCAB,
    agreement,
    bits_per_byte,
    corpus,
    cross_entropy,
    ids_of,
    library,
    opened,
    sample_bits,
    sample_of,
    save,
    windows_of,
)

WARM_UP, REPORT, SAVE = 60, 250, 1000
"""Steps until the rate is full, between lines of the log, and between saved weights."""


class Stage(NamedTuple):
    """Steps of `batch` random windows of `context` tokens."""

    context: int
    batch: int
    steps: int


class Recipe(NamedTuple):
    """A model's shape, as fields of transformers' LlamaConfig, and how it is trained."""

    shape: dict[str, int]
    stages: tuple[Stage, ...]
    rate: float

    @property
    def steps(self) -> int:
        """Of all stages."""
        return sum(stage.steps for stage in self.stages)

    def scaled(self, scale: float) -> Recipe:
        """The same with that many times the steps, one a stage at least."""
        stages = [stage._replace(steps=max(1, round(scale * stage.steps))) for stage in self.stages]
        return self._replace(stages=tuple(stages))


RECIPES = {
    "target": Recipe(
        {
            "hidden_size": 256,
            "intermediate_size": 512,
            "num_hidden_layers": 5,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 64,
        },
        (Stage(256, 64, 500), Stage(512, 48, 1000), Stage(LONGEST, 24, 700)),
        rate=0.01,
    ),
    "draft": Recipe(
        {
            "hidden_size": 128,
            "intermediate_size": 384,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
        },
        (Stage(256, 64, 1500), Stage(512, 48, 2500), Stage(LONGEST, 24, 1000)),
        rate=0.01,
    ),
}


def untrained(recipe: Recipe) -> Any:
    """A Llama of that shape, its weights drawn from torch's own generator."""
    import transformers

    config = transformers.LlamaConfig(
        **recipe.shape,
        vocab_size=VOCAB,
        max_position_embeddings=LONGEST,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def optimizers(module: Any, rate: float) -> list[Any]:
    """Muon for the matrices of the layers, AdamW for the rest."""
    import torch

    if not hasattr(torch.optim, "Muon"):
        raise SystemExit(f"torch {torch.__version__} has no Muon. Install torch 2.9 or later")
    named = list(module.named_parameters())
    matrices = [tensor for name, tensor in named if tensor.dim() == 2 and "embed" not in name]
    chosen = set(map(id, matrices))
    others = [tensor for _, tensor in named if id(tensor) not in chosen]
    muon = torch.optim.Muon(matrices, lr=rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW(others, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def rate_at(step: int, steps: int) -> float:
    """Share of the full rate: a line up, then half a cosine down to nearly nothing."""
    return min(1.0, (step + 1) / WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))


def text_loss(module: Any, windows: Any) -> Any:
    """Nats of a byte of the text."""
    return cross_entropy(module(windows[:, :-1], use_cache=False).logits, windows[:, 1:])


def likeness_loss(target: Any) -> Callable[[Any, Any], Any]:
    """A loss like `text_loss`: nats of a byte that the target draws."""
    import torch

    def loss(module: Any, windows: Any) -> Any:
        with torch.no_grad():
            meant = target(windows[:, :-1], use_cache=False).logits.float().softmax(-1)
        logits = module(windows[:, :-1], use_cache=False).logits.float()
        return -(meant * logits.log_softmax(-1)).sum(-1).mean()

    return loss


def train(
    recipe: Recipe,
    ids: Any,
    held_out: Any,
    loss_of: Callable[[Any, Any], Any],
    seed: int,
    keep: Callable[[Any], None],
) -> tuple[Any, list[dict[str, float]]]:
    """A module trained on random windows of `ids`, and a line of the log every REPORT steps.

    ids        where it is, the module is trained
    held_out   windows whose bits per byte the log tells
    keep       called with the module every SAVE steps
    """
    import torch

    torch.manual_seed(seed)
    module = untrained(recipe).to(ids.device).train()
    both = optimizers(module, recipe.rate)
    draw = torch.Generator().manual_seed(seed)
    log: list[dict[str, float]] = []
    begun, tokens, nats, step = time.perf_counter(), 0, [], 0
    for stage in recipe.stages:
        for _ in range(stage.steps):
            starts = torch.randint(len(ids) - stage.context, (stage.batch,), generator=draw)
            windows = torch.stack([ids[at : at + stage.context + 1] for at in starts]).long()
            for group in (group for each in both for group in each.param_groups):
                group["lr"] = recipe.rate * rate_at(step, recipe.steps)
            with torch.autocast(ids.device.type, torch.bfloat16):
                loss = loss_of(module, windows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            for each in both:
                each.step()
                each.zero_grad()
            step, tokens = step + 1, tokens + stage.batch * stage.context
            nats.append(loss.item())
            if step % SAVE == 0:
                keep(module)
            if step % REPORT == 0 or step == recipe.steps:
                log.append(
                    {
                        "step": step,
                        "tokens": tokens,
                        "seconds": round(time.perf_counter() - begun, 1),
                        "train_loss_bits": round(sum(nats) / len(nats) / math.log(2), 4),
                        "held_out_bits": round(bits_per_byte(module, held_out), 4),
                    }
                )
                nats.clear()
                print(json.dumps(log[-1]), flush=True)
    return module.eval(), log


def trained(part: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """The checkpoint of one part is in its folder. What the log says about it."""
    import torch

    recipe = RECIPES[part].scaled(arguments.scale)
    device, texts = arguments.device, library(arguments.text)
    held_ids = ids_of([text for text in texts if text.held_out]).to(device)
    loss: Callable[[Any, Any], Any] = text_loss
    if part == "draft":
        loss = likeness_loss(opened(folder.parent / FOLDERS["target"]).to(device))
    module, log = train(
        recipe,
        ids_of([text for text in texts if not text.held_out]).to(device),
        windows_of(held_ids, 24),
        loss,
        arguments.seed,
        lambda module: save(module, folder),
    )
    save(module, folder)
    shipped, windows = opened(folder), windows_of(held_ids.cpu(), 256)
    figures: dict[str, Any] = {
        "command": command_of(sys.argv),
        "seed": arguments.seed,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "loss": "text" if part == "target" else "the target's distributions",
        "shape": recipe.shape,
        "stages": [stage._asdict() for stage in recipe.stages],
        "rate": recipe.rate,
        "parameters": sum(tensor.numel() for tensor in shipped.parameters()),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "seconds": log[-1]["seconds"],
        "held_out_bits": round(bits_per_byte(shipped, windows), 4),
        "sample": sample_bits(shipped, sample_of(texts)),
    }
    if part == "draft":
        target = opened(folder.parent / FOLDERS["target"])
        figures["agreement"] = agreement(target, shipped, windows)
    return {**figures, "log": log}


def _arguments() -> argparse.Namespace:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(
        "python -m bench.train_tiny", description=__doc__.split("\n")[0]
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="target, draft; both if none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="cpu where there is no GPU")
    parser.add_argument("--scale", type=float, default=1.0, help="times the steps")
    parser.add_argument("--text", type=Path, help="another Python's library")
    parser.add_argument("--folder", type=Path, default=root / "forge" / "models")
    parser.add_argument("--json", default=str(root / "bench" / "results" / "tiny-training.json"))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(PARTS):
        parser.error(f"{sorted(unknown)[0]!r} is no part. Name target, draft or both")
    return arguments


def main() -> None:
    """Train what is asked for, the target first; write the checkpoints and the log."""
    arguments = _arguments()
    log = Path(arguments.json)
    # A part that is not trained now keeps what the log says about it.
    figures = json.loads(log.read_text())["figures"] if log.exists() else {}
    figures["corpus"] = corpus(library(arguments.text))
    for part in PARTS:
        if part in arguments.parts or not arguments.parts:
            figures[part] = trained(part, arguments.folder / FOLDERS[part], arguments)
            write(arguments.json, record("train_tiny", figures))
            print({key: value for key, value in figures[part].items() if key != "log"}, flush=True)


if __name__ == "__main__":
    main()
