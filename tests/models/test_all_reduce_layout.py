"""AllReduceLayout: every call fits its memory, and its CTAs have all of its vectors once."""

from __future__ import annotations

import pytest

from forge.models.all_reduce_layout import AllReduceLayout, has_flags

LAYOUTS = (
    AllReduceLayout(2, 128, 512, 2**18, 20 * 2**20),
    AllReduceLayout(8, 128, 512, 37440, 2**20),
    AllReduceLayout(2, 3, 32, 512, 2048),
)
SIZES = (16, 496, 512, 528, 2048, 5120, 81920, 2**18, 2**18 + 16, 2**20, 20 * 2**20)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_memory_of_the_kernels_does_not_overlap(layout: AllReduceLayout) -> None:
    packets, flagged = map(layout.region, ("reduce_packets", "reduce_flagged"))
    slots = 2 * layout.world_size
    assert packets.slots_offset == 0
    # Eight bytes for each word of data, the last 32 vectors whole.
    last_vector = layout.max_packet_bytes // 16 - 1
    assert (last_vector // 32 * 64 + last_vector % 32 + 32 + 1) * 16 <= packets.slot_bytes
    assert slots * packets.slot_bytes <= flagged.slots_offset
    assert layout.max_bytes <= flagged.slot_bytes
    assert flagged.slots_offset + slots * flagged.slot_bytes <= flagged.flags_offset
    assert flagged.flags_offset + 4 * slots * layout.max_ctas <= layout.total_bytes
    assert all(each % 16 == 0 for each in (*packets, *flagged))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_ctas_of_a_launch_have_all_vectors_and_no_more_threads_than_the_layout(
    layout: AllReduceLayout,
) -> None:
    for num_bytes in SIZES:
        if num_bytes > layout.max_bytes:
            continue
        launch = layout.select_launch(num_bytes, None)
        assert has_flags(launch.kernel) == (num_bytes > layout.max_packet_bytes)
        assert launch.kernel.endswith("_wide") == (launch.chunk_vectors > launch.num_threads)
        assert launch.num_threads <= layout.max_threads
        assert launch.num_threads % 32 == 0
        assert launch.chunk_vectors in [each * launch.num_threads for each in (1, 2, 3, 4)]
        num_chunks = -(-num_bytes // (16 * launch.chunk_vectors))
        assert launch.num_ctas == min(layout.max_ctas, num_chunks)


def test_a_short_message_is_divided_among_ctas_and_a_row_with_a_norm_is_not() -> None:
    layout = LAYOUTS[0]
    assert layout.select_launch(5120, None)[1:] == (3, 128, 128)
    assert layout.select_launch(5120, 5120)[1:] == (1, 320, 320)
    assert layout.select_launch(32768, 32768)[1:] == (1, 512, 2048)
    assert layout.max_row_bytes == 32768
    assert layout.select_launch(256 * 5120, 5120) == ("reduce_flagged", 128, 320, 320)
