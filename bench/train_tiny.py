"""Trains the embedded pair, `tiny` and `tiny-draft`, from random weights: minutes on a GPU.

Owns the two shapes, the training and its log. Knows nothing of serving: it writes checkpoints like
any other. The text and the measures are those of forge.bench.tiny.

    python -m forge.bench.train_tiny [target] [draft] [--seed 0] [--device cuda] [--scale 1]
                               [--text FOLDER] [--folder forge/models]
                               [--json bench/results/tiny-training.json]

    text ─┬─► target ─► tiny          learns the text
          └───► draft ─► tiny_draft   learns the distributions of the target on the same text
    each: short windows, then longer ones, the last as long as the models' contexts

The draft learns the distributions of the target, not the text (Hinton et al. 2015): its drafts are
accepted where the two agree. Matrices are trained by Muon (Jordan et al. 2024), which needs fewer
steps than AdamW here; embeddings and norms by AdamW. On a CPU, equal seeds and versions give equal
weights on one machine; elsewhere sums round differently. A CPU takes half a day; `--scale 0.01`
tests the program there.
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

from forge.bench.result_file import create_result, redacted_command, write_json
from forge.bench.tiny import (
    FOLDERS,
    MAX_POSITIONS,
    ROLES,
    VOCAB,
    agreement,
    bits_per_byte,
    choose_sample,
    cross_entropy,
    describe_corpus,
    encode,
    load_checkpoint,
    read_library,
    sample_bits,
    save_checkpoint,
    split_windows,
)

WARM_UP_STEPS, LOG_STEPS, SAVE_STEPS = 60, 250, 1000
"""Steps until the full learning rate, between lines of the log, and between saved weights."""


class Stage(NamedTuple):
    """Steps of `batch` random windows of `context` tokens."""

    context: int
    batch: int
    steps: int


class Recipe(NamedTuple):
    """A model's shape, as fields of transformers' LlamaConfig, and how it is trained."""

    shape: dict[str, int]
    stages: tuple[Stage, ...]
    learning_rate: float

    @property
    def num_steps(self) -> int:
        """Steps of all stages."""
        return sum(stage.steps for stage in self.stages)

    def scale_steps(self, scale: float) -> Recipe:
        """Return the recipe with the steps of each stage multiplied by `scale`, at least 1."""
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
        (Stage(256, 64, 500), Stage(512, 48, 1000), Stage(MAX_POSITIONS, 24, 700)),
        learning_rate=0.01,
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
        (Stage(256, 64, 1500), Stage(512, 48, 2500), Stage(MAX_POSITIONS, 24, 1000)),
        learning_rate=0.01,
    ),
}


def create_module(recipe: Recipe) -> Any:
    """Return a Llama of that shape, with weights drawn from torch's default generator."""
    import transformers

    config = transformers.LlamaConfig(
        **recipe.shape,
        vocab_size=VOCAB,
        max_position_embeddings=MAX_POSITIONS,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )
    return transformers.AutoModelForCausalLM.from_config(config)


def create_optimizers(module: Any, learning_rate: float) -> list[Any]:
    """Return Muon for the matrices of the layers, AdamW for the rest."""
    import torch

    if not hasattr(torch.optim, "Muon"):
        raise SystemExit(f"torch {torch.__version__} has no Muon. Install torch 2.9 or later")
    parameters = list(module.named_parameters())
    matrices = [tensor for name, tensor in parameters if tensor.dim() == 2 and "embed" not in name]
    chosen = set(map(id, matrices))
    others = [tensor for _, tensor in parameters if id(tensor) not in chosen]
    muon = torch.optim.Muon(
        matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    adamw = torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    return [muon, adamw]


def learning_rate_fraction(step: int, steps: int) -> float:
    """Return the share of the full rate: a linear warm-up, then half a cosine to nearly 0."""
    return min(1.0, (step + 1) / WARM_UP_STEPS) * 0.5 * (1 + math.cos(math.pi * step / steps))


def text_loss(module: Any, windows: Any) -> Any:
    """Return the nats of a byte of the text."""
    return cross_entropy(module(windows[:, :-1], use_cache=False).logits, windows[:, 1:])


def create_distillation_loss(target: Any) -> Callable[[Any, Any], Any]:
    """Return a loss like `text_loss`: nats of a byte that the target draws."""
    import torch

    def loss(module: Any, windows: Any) -> Any:
        with torch.no_grad():
            target_probs = target(windows[:, :-1], use_cache=False).logits.float().softmax(-1)
        logits = module(windows[:, :-1], use_cache=False).logits.float()
        return -(target_probs * logits.log_softmax(-1)).sum(-1).mean()

    return loss


def train(
    recipe: Recipe,
    ids: Any,
    held_out: Any,
    loss_of: Callable[[Any, Any], Any],
    seed: int,
    on_save: Callable[[Any], None],
) -> tuple[Any, list[dict[str, float]]]:
    """Return a module trained on random windows of `ids`, and a log line every LOG_STEPS steps.

    ids        [tokens] on the device of the training
    held_out   windows whose bits per byte are logged
    on_save    called with the module every SAVE_STEPS steps
    """
    import torch

    torch.manual_seed(seed)
    module = create_module(recipe).to(ids.device).train()
    optimizer_pair = create_optimizers(module, recipe.learning_rate)
    draw = torch.Generator().manual_seed(seed)
    log: list[dict[str, float]] = []
    start_s, tokens, losses, step = time.perf_counter(), 0, [], 0
    for stage in recipe.stages:
        for _ in range(stage.steps):
            starts = torch.randint(len(ids) - stage.context, (stage.batch,), generator=draw)
            windows = torch.stack([ids[at : at + stage.context + 1] for at in starts]).long()
            for group in (group for each in optimizer_pair for group in each.param_groups):
                group["lr"] = recipe.learning_rate * learning_rate_fraction(step, recipe.num_steps)
            with torch.autocast(ids.device.type, torch.bfloat16):
                loss = loss_of(module, windows)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
            for each in optimizer_pair:
                each.step()
                each.zero_grad()
            step, tokens = step + 1, tokens + stage.batch * stage.context
            losses.append(loss.item())
            if step % SAVE_STEPS == 0:
                on_save(module)
            if step % LOG_STEPS == 0 or step == recipe.num_steps:
                log.append(
                    {
                        "step": step,
                        "tokens": tokens,
                        "seconds": round(time.perf_counter() - start_s, 1),
                        "train_loss_bits": round(sum(losses) / len(losses) / math.log(2), 4),
                        "held_out_bits": round(bits_per_byte(module, held_out), 4),
                    }
                )
                losses.clear()
                print(json.dumps(log[-1]), flush=True)
    return module.eval(), log


def train_part(role: str, folder: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train a model and write its checkpoint. Returns its figures and log."""
    import torch

    recipe = RECIPES[role].scale_steps(arguments.scale)
    device, texts = arguments.device, read_library(arguments.text)
    held_ids = encode([text for text in texts if text.is_holdout]).to(device)
    loss: Callable[[Any, Any], Any] = text_loss
    if role == "draft":
        loss = create_distillation_loss(
            load_checkpoint(folder.parent / FOLDERS["target"]).to(device)
        )
    module, log = train(
        recipe,
        encode([text for text in texts if not text.is_holdout]).to(device),
        split_windows(held_ids, 24),
        loss,
        arguments.seed,
        lambda module: save_checkpoint(module, folder),
    )
    save_checkpoint(module, folder)
    saved, windows = load_checkpoint(folder), split_windows(held_ids.cpu(), 256)
    figures: dict[str, Any] = {
        "command": redacted_command(sys.argv),
        "seed": arguments.seed,
        "device": torch.cuda.get_device_name() if device.startswith("cuda") else device,
        "loss": "text" if role == "target" else "the target's distributions",
        "shape": recipe.shape,
        "stages": [stage._asdict() for stage in recipe.stages],
        "rate": recipe.learning_rate,
        "parameters": sum(tensor.numel() for tensor in saved.parameters()),
        "bytes": sum(file.stat().st_size for file in folder.iterdir()),
        "seconds": log[-1]["seconds"],
        "held_out_bits": round(bits_per_byte(saved, windows), 4),
        "sample": sample_bits(saved, choose_sample(texts)),
    }
    if role == "draft":
        target = load_checkpoint(folder.parent / FOLDERS["target"])
        figures["agreement"] = agreement(target, saved, windows)
    return {**figures, "log": log}


def _parse_arguments() -> argparse.Namespace:
    root = Path(__file__).resolve().parent.parent
    parser = argparse.ArgumentParser(
        "python -m forge.bench.train_tiny", description=__doc__.split("\n")[0]
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="target, draft; both if none")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda", help="cpu where there is no GPU")
    parser.add_argument("--scale", type=float, default=1.0, help="factor of the steps")
    parser.add_argument("--text", type=Path, help="another Python's library")
    parser.add_argument("--folder", type=Path, default=root / "forge" / "models")
    parser.add_argument("--json", default=str(root / "bench" / "results" / "tiny-training.json"))
    arguments = parser.parse_args()
    if unknown := set(arguments.parts) - set(ROLES):
        parser.error(f"{sorted(unknown)[0]!r} is no part. Name target, draft or both")
    return arguments


def main() -> None:
    """Train the named parts, the target first; write the checkpoints and the log."""
    arguments = _parse_arguments()
    log = Path(arguments.json)
    # A part that is not trained now keeps its log.
    figures = json.loads(log.read_text())["figures"] if log.exists() else {}
    figures["corpus"] = describe_corpus(read_library(arguments.text))
    for role in ROLES:
        if role in arguments.parts or not arguments.parts:
            figures[role] = train_part(role, arguments.folder / FOLDERS[role], arguments)
            write_json(arguments.json, create_result("train_tiny", figures))
            print({key: value for key, value in figures[role].items() if key != "log"}, flush=True)


if __name__ == "__main__":
    main()
