"""Parts of a checkpoint: only they are read, and together they are the weights of one rank."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from forge.config import DeviceOptions  # noqa: E402
from forge.errors import InvalidConfig  # noqa: E402
from forge.models.hf.decoders.module_decoder import register_attention  # noqa: E402
from forge.models.hf.loading.checkpoint import (  # noqa: E402
    Checkpoint,
    build_meta_module,
    load_module,
    mean_layer_weights,
    open_checkpoint,
    plan_weights,
)
from forge.models.hf.loading.decoder_loader import agree_prefill, load_decoder  # noqa: E402
from forge.models.hf.loading.kernel_selection import PrefillKernels  # noqa: E402
from forge.models.hf.loading.kv_tiers import create_tier_setup  # noqa: E402
from forge.models.hf.loading.model_loader import open_model  # noqa: E402
from forge.models.hf.loading.partition import WHOLE, ShardedModel, partition_for  # noqa: E402
from forge.models.hf.loading.sharded_weights import (  # noqa: E402
    SlicedFiles,
    load_sharded_module,
)
from forge.models.hf.parallel.module_layout import find_layout  # noqa: E402
from forge.models.hf.parallel.sharded_module import fill_module, shrink_module  # noqa: E402
from forge.models.hf.parallel.sharding import HeadCounts, Shard, VocabShard  # noqa: E402
from forge.start_log import StartLog  # noqa: E402
from forge.tier_options import TierOptions  # noqa: E402
from tests.hf.families import create_module  # noqa: E402
from tests.hf.thread_ranks import create_communicators, run_ranks, select_part  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.timeout(120)]
CPU = torch.device("cpu")
FAMILIES = ("llama", "qwen2", "phi3", "gemma2")


@pytest.fixture(autouse=True)
def _registered() -> None:
    torch.set_num_threads(1)
    register_attention()


@pytest.fixture(scope="module", params=FAMILIES)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    """A folder that tests only read."""
    folder = tmp_path_factory.mktemp(request.param)
    create_module(request.param, torch.float32).save_pretrained(folder)
    return open_checkpoint(str(folder), CPU, "float32")


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_parts_of_all_ranks_are_the_weights_of_one(
    checkpoint: Checkpoint, ranks: int, load_format: str
) -> None:
    whole = load_module(checkpoint, CPU, load_format)
    parameters = dict(whole.named_parameters(remove_duplicate=False))
    for communicator in create_communicators(ranks):
        part = load_sharded_module(checkpoint, communicator, CPU, load_format)
        layout = find_layout(whole, Shard(communicator.rank, ranks))
        found = dict(part.named_parameters(remove_duplicate=False))
        missing = layout.first_only & parameters.keys() if communicator.rank else set()
        assert found.keys() == parameters.keys() - missing
        for name, tensor in found.items():
            expected = select_part(parameters[name], layout.slices.get(name))
            assert torch.equal(tensor, expected), name
        for name, buffer in part.named_buffers():
            assert torch.equal(buffer, whole.get_buffer(name)), name


def test_only_a_ranks_part_is_read_of_the_files(checkpoint: Checkpoint) -> None:
    """Each number of a divided tensor is read by one rank of two, those of the others by both."""
    num_read = []
    for rank in range(2):
        module = build_meta_module(checkpoint, "eager")
        layout = find_layout(module, Shard(rank, 2))
        plan = plan_weights(checkpoint, module, "auto")
        whole = shrink_module(module, layout, plan.ties, rank)
        with ThreadPoolExecutor(1) as executor:
            files = SlicedFiles(plan, layout.slices, CPU, torch.float32, executor)
            fill_module(module, whole, layout, CPU, files.read)
        num_read.append(files.num_read)
    shapes = {name: torch.Size(shape).numel() for name, shape in whole.shapes.items()}
    divided = sum(size for name, size in shapes.items() if name in layout.slices)
    by_first_only = sum(size for name, size in shapes.items() if name in layout.first_only)
    both = sum(shapes.values()) - divided - by_first_only
    assert sum(num_read) == divided + by_first_only + 2 * both
    assert max(num_read) < sum(shapes.values()) * (0.75 if not whole.is_tied else 0.8)


def test_a_tied_head_is_a_view_of_the_embedding(tmp_path: Path) -> None:
    create_module("qwen2", torch.float32).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), CPU, "float32")
    for communicator in create_communicators(2):
        part = load_sharded_module(checkpoint, communicator, CPU)
        embedding, head = part.model.embed_tokens.weight, part.lm_head.weight
        assert head.shape[0] == (154, 153)[communicator.rank]
        assert head.data_ptr() == embedding[154 * communicator.rank :].data_ptr()


def test_a_tensor_under_another_name_is_refused_by_name(tmp_path: Path) -> None:
    create_module("llama", torch.float32).save_pretrained(tmp_path)
    from safetensors.torch import load_file, save_file

    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["other.weight"] = tensors.pop("model.layers.1.mlp.up_proj.weight")
    save_file(tensors, file, {"format": "pt"})
    checkpoint = open_checkpoint(str(tmp_path), CPU, "float32")
    (one, _) = create_communicators(2)
    with pytest.raises(InvalidConfig, match=r"lacks .*: model\.layers\.1\.mlp\.up_proj\.weight\."):
        load_sharded_module(checkpoint, one, CPU)


def test_a_tensor_of_another_shape_is_refused_by_name(tmp_path: Path) -> None:
    create_module("llama", torch.float32).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 100}))
    checkpoint = open_checkpoint(str(tmp_path), CPU, "float32")
    (one, _) = create_communicators(2)
    with pytest.raises(InvalidConfig, match=r"mlp\.\w+\.weight is 64x96, not 64x100"):
        load_sharded_module(checkpoint, one, CPU)


@pytest.mark.parametrize(
    ("divide", "problem"),
    [
        (lambda shard: shard.heads(HeadCounts(10, 2)), "10 attention heads cannot be divided by 4"),
        (lambda shard: shard.heads(HeadCounts(12, 6)), "6 key and value heads are neither"),
        (lambda shard: shard.inner_rows(98), "intermediate size 98 cannot be divided by 4"),
        (lambda shard: VocabShard.of(shard, 5), "5 token ids are too few for 4"),
    ],
)
def test_what_cannot_be_divided_is_refused_with_its_numbers(divide: Any, problem: str) -> None:
    with pytest.raises(InvalidConfig, match=f"tensor_parallel_size: .*{problem}"):
        divide(Shard(0, 4))


def test_a_key_head_is_on_every_rank_whose_queries_read_it() -> None:
    """Eight query heads of two dimensions; two key heads, each read by four of them."""
    rows = [Shard(rank, 4).head_rows(HeadCounts(8, 2), 2) for rank in range(4)]
    assert rows == [
        ((0, 4), (0, 2)),
        ((4, 8), (0, 2)),
        ((8, 12), (2, 4)),
        ((12, 16), (2, 4)),
    ]


def test_ids_are_divided_to_equal_widths_and_the_last_rank_has_the_rest() -> None:
    parts = [VocabShard.of(Shard(rank, 4), 307) for rank in range(4)]
    assert [(each.first, each.end, each.width) for each in parts] == [
        (0, 77, 77),
        (77, 154, 77),
        (154, 231, 77),
        (231, 307, 77),
    ]
    assert ShardedModel(create_communicators(4)[0]).probe_vocab_size(307) == 76


def test_ranks_agree_on_the_fewest_blocks_and_the_largest_error() -> None:
    def agree(communicator: Any) -> tuple[int, float, float]:
        partition = ShardedModel(communicator)
        nan = float("nan") if communicator.rank else 1.0
        return (
            partition.fewest(10 - communicator.rank, CPU),
            partition.largest(0.5 * communicator.rank, CPU),
            partition.largest(nan, CPU),
        )

    for fewest, largest, undefined in run_ranks(create_communicators(2), agree):
        assert (fewest, largest) == (9, 0.5)
        assert undefined != undefined


def test_one_process_has_no_communicator() -> None:
    assert partition_for(None) is WHOLE
    assert partition_for(create_communicators(1)[0]) is WHOLE
    assert (WHOLE.fewest(3, CPU), WHOLE.largest(0.5, CPU)) == (3, 0.5)


def test_options_that_ranks_do_not_have_are_refused_by_name(tmp_path: Path) -> None:
    (one, _) = create_communicators(2)
    compiled = DeviceOptions(device="cpu", torch_compile=True)
    files = create_tier_setup(
        TierOptions(kv_host_gib=0.01, kv_disk_path=str(tmp_path / "kv"), kv_disk_gib=0.01), True
    )
    for options, tiers, field in (
        (compiled, None, "torch_compile"),
        (DeviceOptions(device="cpu"), files, "kv_disk_path"),
    ):
        with (
            pytest.raises(InvalidConfig, match=rf"{field}: .*\b2\b"),
            open_model("anything", {}, options, tiers=tiers, communicator=one),
        ):
            pass


def test_ranks_count_equal_weights_of_a_layer_though_one_alone_has_biases(tmp_path: Path) -> None:
    """The count decides which graphs are captured, in which the ranks meet."""
    module = create_module("llama", torch.float32)
    config = module.config
    config.attention_bias = config.mlp_bias = True
    with torch.device("cpu"):
        type(module)(config).save_pretrained(tmp_path)
    checkpoint = open_checkpoint(str(tmp_path), CPU, "float32")
    parts = [load_sharded_module(checkpoint, each, CPU) for each in create_communicators(2)]
    counts = [mean_layer_weights(part) for part in parts]
    assert counts[0] == counts[1] + 2 * config.hidden_size

    def count(communicator: Any) -> int:
        loaded = load_decoder(
            checkpoint,
            {"max_model_len": 64, "block_size": 16},
            DeviceOptions(device="cpu", dtype="float32"),
            CPU,
            StartLog(),
            partition=ShardedModel(communicator),
        )
        return loaded.layer_weights

    assert run_ranks(create_communicators(2), count) == [counts[1]] * 2


@pytest.mark.parametrize("has_wrappers", [(True, True), (True, False), (False, False)])
def test_ranks_have_flashinfers_kernels_together_or_not_at_all(
    has_wrappers: tuple[bool, bool],
) -> None:
    def agree(communicator: Any) -> bool:
        wrappers: Any = object() if has_wrappers[communicator.rank] else None
        found = PrefillKernels(wrappers, ())
        agreed = agree_prefill(found, ShardedModel(communicator), CPU)
        return agreed.wrappers is not None

    assert run_ranks(create_communicators(2), agree) == [all(has_wrappers)] * 2
