"""Partition: how a model is divided over the ranks that serve it.

Owns what a start does differently for each: which weights it loads, how the decoder meets the
other ranks, and what all ranks agree on.

    WHOLE               one process has the model
    ShardedModel        each rank has a part of every layer and of the vocabulary
    ReplicatedModel     each rank has the whole model: the draft of a sharded one

Always true: with WHOLE nothing communicates. Ranks load in the same order, since they meet while
their decoders are compared.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import torch

from forge.config import DeviceOptions
from forge.errors import InvalidConfig
from forge.models.hf.decoders.fused_decoder import FusedDecoder
from forge.models.hf.loading.checkpoint import Checkpoint, load_module
from forge.models.hf.loading.kv_tiers import TierSetup
from forge.models.hf.loading.sharded_weights import load_sharded_module
from forge.models.hf.parallel.agreement import gather_over_communicator, raise_on_all
from forge.models.hf.parallel.communicator import Communicator
from forge.models.hf.parallel.sharded_decoder import ShardedDecoder
from forge.models.hf.parallel.sharded_sampler import AgreedSampler, ShardedSampler
from forge.models.hf.parallel.sharding import Shard, VocabShard
from forge.models.hf.sampling.sampler import Sampler


class Partition(Protocol):
    """Division of a model over the ranks that serve it."""

    def create_decoder(self, *parts: Any) -> FusedDecoder:
        """Return the decoder of these arguments of FusedDecoder."""
        ...

    def load_module(
        self, checkpoint: Checkpoint, device: torch.device, load_format: str, attention: str
    ) -> Any:
        """Return this process's part of the checkpoint's module, as `checkpoint.load_module`."""
        ...

    def create_sampler(self, num_slots: int, vocab_size: int, device: torch.device) -> Sampler:
        """Return a sampler of the logits that this process's decoder computes."""
        ...

    def records_starts(self) -> bool:
        """Return whether a start may use and write a DecoderRecord, which is of whole weights."""
        ...

    def largest(self, number: float, device: torch.device) -> float:
        """Return the largest of all ranks' numbers; NaN where one is."""
        ...

    def check_options(self, options: DeviceOptions, tiers: TierSetup | None) -> None:
        """Raise InvalidConfig for options that a model divided like this does not have."""
        ...

    def check_changes(self) -> None:
        """Raise InvalidConfig where weights can be neither updated nor released."""
        ...

    def draft(self) -> Partition:
        """Return how the draft of this model is divided."""
        ...

    def fewest(self, number: int, device: torch.device) -> int:
        """Return the smallest of all ranks' numbers."""
        ...

    def raise_on_all(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context for a part of the start in which ranks do not meet.

        Where it raises on one rank, all ranks raise at its end.
        """
        ...

    def probe_vocab_size(self, vocab_size: int) -> int:
        """Return how many of `vocab_size` ids are in the logits of every rank."""
        ...


class WholeModel:
    """Model of one process."""

    def create_decoder(self, *parts: Any) -> FusedDecoder:
        """Return the decoder of these arguments of FusedDecoder."""
        return FusedDecoder(*parts)

    def load_module(
        self, checkpoint: Checkpoint, device: torch.device, load_format: str, attention: str
    ) -> Any:
        """Return the checkpoint's module."""
        return load_module(checkpoint, device, load_format, attention)

    def create_sampler(self, num_slots: int, vocab_size: int, device: torch.device) -> Sampler:
        """Return a sampler of whole logits."""
        return Sampler(num_slots, vocab_size, device)

    def records_starts(self) -> bool:
        """Return True."""
        return True

    def largest(self, number: float, device: torch.device) -> float:
        """Return the number."""
        return number

    def fewest(self, number: int, device: torch.device) -> int:
        """Return the number."""
        return number

    def raise_on_all(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context that does nothing."""
        return nullcontext()

    def check_options(self, options: DeviceOptions, tiers: TierSetup | None) -> None:
        """Do nothing: one process has every option."""

    def check_changes(self) -> None:
        """Do nothing: one process has all weights."""

    def draft(self) -> Partition:
        """Return the partition of a draft in the same process."""
        return self

    def probe_vocab_size(self, vocab_size: int) -> int:
        """Return `vocab_size`."""
        return vocab_size


WHOLE = WholeModel()


class ReplicatedModel(WholeModel):
    """Model that every rank has whole. Its samples are rank 0's on every rank."""

    def __init__(self, communicator: Communicator) -> None:
        self._communicator = communicator

    def create_sampler(self, num_slots: int, vocab_size: int, device: torch.device) -> Sampler:
        """Return a sampler whose tokens are rank 0's."""
        return AgreedSampler(self._communicator, num_slots, vocab_size, device)

    def records_starts(self) -> bool:
        """Return False: one rank might find a record that another lacks."""
        return False

    def largest(self, number: float, device: torch.device) -> float:
        """Return the largest of all ranks' numbers; NaN where one is."""
        mine = torch.tensor([number], dtype=torch.float64, device=device)
        return float(self._communicator.all_gather(mine).max())

    def fewest(self, number: int, device: torch.device) -> int:
        """Return the smallest of all ranks' numbers."""
        return int(-self.largest(-number, device))

    def raise_on_all(self, device: torch.device) -> AbstractContextManager[None]:
        """Return a context whose error on one rank is raised by all: the others by EngineDead."""
        return raise_on_all(gather_over_communicator(self._communicator, device))


class ShardedModel(ReplicatedModel):
    """Model of which each rank has a part."""

    def create_decoder(self, *parts: Any) -> FusedDecoder:
        """Return the decoder of these arguments of FusedDecoder, with all-reduces."""
        return ShardedDecoder(self._communicator, *parts)

    def load_module(
        self, checkpoint: Checkpoint, device: torch.device, load_format: str, attention: str
    ) -> Any:
        """Return the rank's part of the checkpoint's module."""
        return load_sharded_module(checkpoint, self._communicator, device, load_format, attention)

    def check_options(self, options: DeviceOptions, tiers: TierSetup | None) -> None:
        """Raise InvalidConfig for compiled modules and for files of blocks.

        A compiled layer cannot meet the other ranks. Files answer late, and each rank's at another
        time.
        """
        if tiers is not None and tiers.has_files:
            raise InvalidConfig(
                "kv_disk_path",
                f"with tensor_parallel_size {self._communicator.world_size} no files of blocks are "
                "kept",
                "Leave it out, or serve the model on one device",
            )
        if options.torch_compile:
            raise InvalidConfig(
                "torch_compile",
                "compiled modules cannot be divided, and tensor_parallel_size is "
                f"{self._communicator.world_size}",
                "Leave it out, or serve the model on one device",
            )

    def check_changes(self) -> None:
        """Raise InvalidConfig: a change of one rank would leave the others as they are."""
        raise InvalidConfig(
            "tensor_parallel_size",
            f"a model on {self._communicator.world_size} ranks keeps its weights and its memory",
            "Serve the model on one device, or start again with the new weights",
        )

    def draft(self) -> Partition:
        """Return the partition of the draft: each rank has all of it."""
        return ReplicatedModel(self._communicator)

    def probe_vocab_size(self, vocab_size: int) -> int:
        """Return the ids of the rank that has the fewest."""
        last = self._communicator.world_size - 1
        return VocabShard.of(Shard(last, last + 1), vocab_size).size

    def create_sampler(self, num_slots: int, vocab_size: int, device: torch.device) -> Sampler:
        """Return a sampler of the rank's part of the logits."""
        return ShardedSampler(self._communicator, num_slots, vocab_size, device)


def partition_for(communicator: Communicator | None) -> Partition:
    """Return the partition of a model that these ranks serve; None: one process serves it."""
    if communicator is None or communicator.world_size == 1:
        return WHOLE
    return ShardedModel(communicator)
