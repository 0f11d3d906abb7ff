"""load_model: from a model's name to a LoadedModel: model, tokenizer, completed configuration.

Owns the order in which a name is looked up. Imports forge.models.hf only when a checkpoint is
opened. A loader is a context manager: it closes the model when the engine is done.

    "hash", "tiny"           embedded models        forge.models.embedded
    "path/of/a/folder"       a checkpoint      ┐
    "owner/name"             one by its id     ┘    forge.models.hf, imported when needed

With `draft_model`, another name, the two are opened as a pair.
"""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from forge.config import MAX_GEOMETRY, DeviceOptions, EngineConfig, Speculation
from forge.errors import InvalidConfig
from forge.models.costs import measure_step_costs
from forge.models.early_start import begin_early
from forge.models.embedded import (
    EMBEDDED_CHECKPOINTS,
    embedded_folder,
    is_embedded,
    open_embedded_model,
)
from forge.models.gc_control import freeze_objects, pause_gc
from forge.models.load_costs import describe_load_costs, measure_load_costs
from forge.models.loaded_model import LoadedModel
from forge.models.mixed_costs import measure_mixed_costs
from forge.models.rank_devices import RANK_VARIABLES, rank_environment
from forge.ranks.rank_context import RankContext
from forge.ranks.rank_lead import RankLead
from forge.start_log import LOG, StartLog
from forge.tier_options import TierOptions
from forge.version import install_remedy

DEVICE_OPTIONS = frozenset(each.name for each in fields(DeviceOptions))
TIER_OPTIONS = frozenset(each.name for each in fields(TierOptions))

SPECULATION_OPTIONS = {
    "num_speculative_tokens": "num_tokens",
    "speculative_method": "method",
    "acceptance": "acceptance",
}
"""Options other than `draft_model` -> their fields of Speculation."""

HUB_ID_PATTERN = re.compile(r"[\w-][\w.-]*/[\w.-]+", re.ASCII)
"""Pattern of Hugging Face's owner/name."""


class LoadOptions(NamedTuple):
    """Options of `load_model`, by what they are about.

    device      those of DeviceOptions that the caller set
    tiers       those of TierOptions, complete
    config      fields of EngineConfig that the caller set, and `speculation`
    draft       name of the draft model, or None
    """

    device: dict[str, Any]
    tiers: TierOptions
    config: dict[str, Any]
    draft: str | None

    @classmethod
    def from_overrides(cls, overrides: Mapping[str, Any]) -> LoadOptions:
        """Return the options that the caller set. Raise InvalidConfig."""
        device = {key: value for key, value in overrides.items() if key in DEVICE_OPTIONS}
        tiers = TierOptions(**{k: v for k, v in overrides.items() if k in TIER_OPTIONS})
        other_names = {"draft_model", *SPECULATION_OPTIONS, *DEVICE_OPTIONS, *TIER_OPTIONS}
        config = {key: value for key, value in overrides.items() if key not in other_names}
        config["speculation"] = _build_speculation(overrides)
        return cls(device, tiers, config, overrides.get("draft_model"))


@contextmanager
def load_model(
    name: str,
    overrides: Mapping[str, Any],
    start: StartLog | None = None,
    lead: RankLead | None = None,
) -> Iterator[LoadedModel]:
    """Open the named model, and close it when the context ends.

    Raise InvalidConfig with the remedy.
    overrides   fields of EngineConfig, DeviceOptions and TierOptions, SPECULATION_OPTIONS and
                `draft_model` that the caller set; the model has defaults for the others
    start       where the phases of the start are recorded; a checkpoint's are logged at its end
    lead        rank 0 of a model that is divided over ranks; None: this process has it alone
    """
    device_overrides, tier_options, config_fields, draft = LoadOptions.from_overrides(overrides)
    if is_embedded(name):
        with open_embedded_model(
            name, draft, device_overrides, config_fields, tier_options
        ) as loaded:
            # The hash model has no costs but those that its options name.
            yield _add_step_costs(loaded) if name in EMBEDDED_CHECKPOINTS else loaded
        return
    if lead is None and device_overrides.get("tensor_parallel_size", 1) != 1:
        raise InvalidConfig(
            "tensor_parallel_size",
            "one process opens this model, alone",
            "Leave it out, or use forge serve, forge generate, LLM or AsyncLLM",
        )
    with ExitStack() as exit_stack:
        exit_stack.callback(release_unused_memory)
        # Nothing here may keep a reference to the model.
        yield exit_stack.enter_context(
            _load_checkpoint(name, overrides, tier_options, start or StartLog(), lead)
        )


@contextmanager
def _load_checkpoint(
    name: str,
    overrides: Mapping[str, Any],
    tier_options: TierOptions,
    start: StartLog,
    lead: RankLead | None,
) -> Iterator[LoadedModel]:
    """Open the named checkpoint with its measured costs, and close it when the context ends."""
    rank_context = None if lead is None else lead.rank_context
    with open_checkpoint_model(name, overrides, start, rank_context) as loaded:
        if lead is not None:
            from forge.models.hf.parallel.rank_steps import lead_model

            loaded = loaded._replace(model=lead_model(loaded.model, lead))
        with start.phase("step costs"):
            loaded = _add_step_costs(loaded._replace(name=name))
            if tier_options.measures_costs:
                loaded = _add_load_costs(loaded)
        start.log_summary()
        defaults = loaded.sampling_defaults
        if defaults.fields:
            LOG.info(
                "generation_config.json: requests without these fields get %s "
                "(off with --generation-config none)",
                defaults.describe(),
            )
        yield loaded


@contextmanager
def open_checkpoint_model(
    name: str,
    overrides: Mapping[str, Any],
    start: StartLog,
    rank_context: RankContext | None = None,
) -> Iterator[LoadedModel]:
    """Open the named checkpoint, or a rank's part of it, and close it when the context ends.

    Raise InvalidConfig.
    overrides      as in `load_model`
    rank_context   rank of this process; None: there is one rank
    """
    if not isinstance(name, str) or not _is_checkpoint(name):
        raise InvalidConfig(
            "model",
            f"{str(name)[:64]!r} is not a model this build serves",
            "Use hash, tiny, the folder of a checkpoint, or a HuggingFace id such as "
            "Qwen/Qwen3-0.6B",
        )
    find_local_folder(name)  # Packages take seconds to import.
    options = LoadOptions.from_overrides(overrides)
    device_options = DeviceOptions(**options.device)
    _check_config_fields(options.config)
    with _open_checkpoint(
        *(name, options.draft, options.config, device_options),
        *(options.tiers, start, rank_context),
    ) as loaded:
        yield loaded


def release_unused_memory() -> None:
    """Collect what a closed model has left, and return memory of the device that torch keeps."""
    gc.collect()
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_initialized():
        torch.cuda.empty_cache()


def import_checkpoint_packages(name: str) -> None:
    """Import the packages that read the name's tokenizer, if they are installed.

    Nothing is raised: `load_model` reports a missing package.
    """
    if isinstance(name, str) and not is_embedded(name) and _is_checkpoint(name):
        with suppress(ImportError), pause_gc():
            import_module("forge.models.hf")


def _check_config_fields(config_fields: Mapping[str, Any]) -> None:
    """Check each field by itself, before anything slow. The model checks the complete set."""
    valid_defaults = {
        "max_num_seqs": 1,
        "max_num_batched_tokens": MAX_GEOMETRY["max_num_batched_tokens"],
    }
    EngineConfig(**{**valid_defaults, **config_fields})


def _is_checkpoint(name: str) -> bool:
    """Return whether the name is a folder, or like a path or an id."""
    written_as_path = name.startswith(("/", "./", "../", "~/"))
    return written_as_path or os.path.isdir(name) or HUB_ID_PATTERN.fullmatch(name) is not None


def find_local_folder(name: str) -> Path | None:
    """Return the named folder, or None for a HuggingFace id. Raise InvalidConfig."""
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        raise InvalidConfig("model", f"{name} is a file", "Name the folder it is in")
    if name.startswith(("/", ".", "~")):
        raise InvalidConfig(
            "model", f"there is no folder {name!r}", "Name the folder of a checkpoint"
        )
    return None


@contextmanager
def refuse_missing_packages(field: str, need: str) -> Iterator[None]:
    """Raise InvalidConfig for a package of models that an import in the context does not find.

    field   option that the error names
    need    beginning of its sentence, such as "a checkpoint needs"
    """
    try:
        yield
    except ModuleNotFoundError as missing:
        if missing.name is None or missing.name.partition(".")[0] == "forge":
            raise
        raise InvalidConfig(
            field, f"{need} {missing.name}, which is not installed", install_remedy("hf")
        ) from None


@contextmanager
def _open_checkpoint(
    name: str,
    draft: str | None,
    config_fields: Mapping[str, Any],
    options: DeviceOptions,
    tier_options: TierOptions,
    start: StartLog,
    rank_context: RankContext | None,
) -> Iterator[LoadedModel]:
    """Import forge.models.hf, which takes seconds, and open the checkpoint with it."""
    if isinstance(draft, str) and draft in EMBEDDED_CHECKPOINTS:
        draft = str(embedded_folder(draft))
    if draft is not None and not (isinstance(draft, str) and _is_checkpoint(draft)):
        raise InvalidConfig(
            "draft_model",
            f"{str(draft)[:64]!r} is no checkpoint",
            "Use tiny-draft, a folder, or a HuggingFace id such as Qwen/Qwen3-0.6B",
        )
    if rank_context is not None:
        os.environ.update(_rank_environment(rank_context, options.device))
    with refuse_missing_packages("model", "a checkpoint needs"):
        # Loading needs a file with weights, and its device the context, right after the imports.
        begin_early(
            Path(name),
            uses_gpu=options.device != "cpu",
            reads_weights=options.load_format != "dummy",
        )
        with start.phase("imports"), pause_gc():
            from forge.models.hf import create_tier_setup, open_model, open_pair
    # A collection during the rest of the start would visit every object of the packages.
    with ExitStack() as exit_stack:
        exit_stack.enter_context(freeze_objects())
        communicator = None
        if rank_context is not None:
            with start.phase("ranks"):
                from forge.models.hf.parallel.rendezvous import open_communicator

                communicator = exit_stack.enter_context(
                    open_communicator(
                        rank_context.rank,
                        rank_context.world_size,
                        rank_context.store_path,
                        options.device,
                    )
                )
        tiers = create_tier_setup(tier_options, config_fields.get("enable_prefix_caching", True))
        opened = (
            open_model(name, config_fields, options, start, tiers, communicator)
            if draft is None
            else open_pair(
                *(name, draft, config_fields, options, start, tiers),
                communicator=communicator,
            )
        )
        yield exit_stack.enter_context(opened)


def _rank_environment(rank_context: RankContext, device: str) -> Mapping[str, str]:
    """Return the variables that a rank's process sets before CUDA starts. Raise InvalidConfig."""
    if device == "cpu" or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return RANK_VARIABLES
    return rank_environment(rank_context.rank, rank_context.world_size, os.environ)


def _add_step_costs(loaded: LoadedModel) -> LoadedModel:
    """Return the model with measured step costs, where speculation or `max_step_ms` needs them."""
    config = loaded.config
    if config.max_step_ms is not None:
        config = replace(config, mixed_costs=measure_mixed_costs(loaded.model, config))
        loaded = loaded._replace(config=config)
    if config.speculation is None:
        return loaded
    costs = measure_step_costs(loaded.model, config)
    return loaded._replace(
        config=replace(config, speculation=replace(config.speculation, costs=costs))
    )


def _add_load_costs(loaded: LoadedModel) -> LoadedModel:
    """Return the model with measured costs of loading and computing, and log them."""
    config = loaded.config
    assert config.host_tier is not None, "there is a host pool"
    costs = measure_load_costs(loaded.model, config)
    if costs is None:
        return loaded
    config = replace(config, host_tier=replace(config.host_tier, costs=costs))
    LOG.info("%s", describe_load_costs(config))
    return loaded._replace(config=config)


def _build_speculation(overrides: Mapping[str, Any]) -> Speculation | None:
    """Return the Speculation that the caller set, or None. Raise InvalidConfig."""
    speculation_options = {key: overrides[key] for key in SPECULATION_OPTIONS if key in overrides}
    speculation = Speculation(
        **{SPECULATION_OPTIONS[key]: value for key, value in speculation_options.items()}
    )
    draft, method = overrides.get("draft_model"), overrides.get("speculative_method")
    if draft is None and method != "ngram":
        for option in speculation_options:
            raise InvalidConfig(
                option,
                "nothing proposes tokens",
                "Name a draft model (--speculative-model), or let speculative_method be ngram",
            )
        return None
    if draft is not None and method == "ngram":
        raise InvalidConfig(
            "speculative_method",
            "ngram takes no draft model, and draft_model names one",
            "Leave one of the two out",
        )
    return speculation
