"""Buffers of a step's numbers: one transfer in, one out, and nothing overwritten too early."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")

from forge.models.hf.buffers import (  # noqa: E402
    MAX_IN_FLIGHT,
    HostCopy,
    InputBuffer,
    OutputBuffer,
    upload,
    upload_groups,
)

pytestmark = pytest.mark.torch
CPU = torch.device("cpu")


def numbers(*values: int) -> np.ndarray:
    return np.array(values, np.int32)


def test_arrays_arrive_one_view_each_in_their_order():
    inbox = InputBuffer(CPU, 8)
    views = inbox.copy_to_device([numbers(1, 2, 3), numbers(), numbers(4, 5)])
    assert [view.tolist() for view in views] == [[1, 2, 3], [], [4, 5]]
    assert all(view.dtype == torch.int32 for view in views)


def test_arrays_are_concatenated_from_the_start_of_the_buffer():
    inbox = InputBuffer(CPU, 8)
    first, second = inbox.copy_to_device([numbers(1, 2, 3), numbers(4, 5)])
    assert inbox.buffer.tolist() == [1, 2, 3, 4, 5, 0, 0, 0]
    assert first.data_ptr() == inbox.buffer.data_ptr()
    assert second.data_ptr() == inbox.buffer.data_ptr() + 3 * 4


def test_the_buffer_keeps_its_place_over_many_steps():
    inbox = InputBuffer(CPU, 4)
    places = {
        inbox.copy_to_device([numbers(step, step + 1)])[0].data_ptr()
        for step in range(2 * MAX_IN_FLIGHT + 1)
    }
    assert places == {inbox.buffer.data_ptr()}
    assert inbox.buffer[:2].tolist() == [2 * MAX_IN_FLIGHT, 2 * MAX_IN_FLIGHT + 1]


def test_as_many_numbers_as_the_buffer_holds_pass_and_one_more_is_a_broken_invariant():
    inbox = InputBuffer(CPU, 4)
    inbox.copy_to_device([numbers(1, 2), numbers(3, 4)])
    with pytest.raises(AssertionError, match="5 numbers for a buffer of 4"):
        inbox.copy_to_device([numbers(1, 2, 3), numbers(4, 5)])


def test_the_host_fills_another_buffer_than_the_one_that_may_still_be_read():
    inbox = InputBuffer(CPU, 2)
    inbox.copy_to_device([numbers(1, 2)])
    (filled,) = [i for i, host in enumerate(inbox._host_buffers) if host.tolist() == [1, 2]]
    inbox.copy_to_device([numbers(3, 4)])
    assert inbox._host_buffers[filled].tolist() == [1, 2]
    inbox.copy_to_device([numbers(5, 6)])
    assert MAX_IN_FLIGHT == 2 and inbox._host_buffers[filled].tolist() == [5, 6]


def test_what_arrives_is_what_was_there_when_it_left():
    source = torch.tensor([[1, 2], [3, 4]])
    arrival = HostCopy(source)
    source.fill_(9)
    assert arrival.wait().tolist() == [[1, 2], [3, 4]]


def test_a_part_of_a_tensor_arrives_as_that_part():
    source = torch.arange(8).view(2, 4)
    arrival = HostCopy(source[:, :3])
    source.zero_()
    assert arrival.wait().tolist() == [[0, 1, 2], [4, 5, 6]]


def test_the_first_rows_leave_and_the_next_step_changes_nothing_of_them():
    outbox = OutputBuffer(CPU, 4)
    outbox.sampled.copy_(torch.tensor([[5, 6, 7, 8], [0, 1, 0, 0]]))
    arrived = outbox.copy_to_host(3)
    outbox.sampled.fill_(9)
    assert arrived().tolist() == [[5, 6, 7], [0, 1, 0]]


def test_numbers_can_be_read_after_as_many_more_steps_as_can_be_in_flight():
    outbox = OutputBuffer(CPU, 1)
    waiting = []
    for step in range(9):
        outbox.sampled.fill_(step)
        waiting.append(outbox.copy_to_host(1))
        oldest = max(0, step - MAX_IN_FLIGHT)
        assert waiting[oldest]().tolist() == [[oldest], [oldest]]


@pytest.mark.gpu
def test_on_a_gpu_numbers_leave_in_the_order_of_the_steps():
    outbox = OutputBuffer(torch.device("cuda"), 256)
    waiting = []
    for step in range(20):
        torch.cuda._sleep(2_000_000)
        outbox.sampled.fill_(step)
        waiting.append(outbox.copy_to_host(256))
        if step >= MAX_IN_FLIGHT:
            assert waiting[step - MAX_IN_FLIGHT]().unique().tolist() == [step - MAX_IN_FLIGHT]


@pytest.mark.gpu
def test_on_a_gpu_what_arrives_is_what_was_there_when_it_left():
    device = torch.device("cuda")
    source = torch.arange(1 << 20, device=device)
    arrivals = []
    for _ in range(20):
        arrivals.append(HostCopy(source))
        source += 1
    for step, arrival in enumerate(arrivals):
        assert arrival.wait()[[0, -1]].tolist() == [step, (1 << 20) - 1 + step]


@pytest.mark.gpu
def test_on_a_gpu_no_step_sees_the_numbers_of_a_later_one():
    """The device is many steps late when the host fills a buffer again: the host must wait."""
    inbox = InputBuffer(torch.device("cuda"), 1 << 16)
    seen = []
    for step in range(8):
        torch.cuda._sleep(20_000_000)
        (view,) = inbox.copy_to_device([np.full(1 << 16, step, np.int32)])
        seen.append(view.clone())
    assert [view.unique().tolist() for view in seen] == [[step] for step in range(8)]


@pytest.mark.gpu
def test_on_a_gpu_an_upload_keeps_its_numbers_while_the_device_is_late() -> None:
    """The device is many steps late: no pinned memory may be written again before it is read."""
    uploaded = []
    for step in range(8):
        torch.cuda._sleep(20_000_000)
        uploaded += upload(torch.device("cuda"), np.full(1 << 16, step, np.int64))
    assert [tensor.unique().tolist() for tensor in uploaded] == [[step] for step in range(8)]


class Pair(NamedTuple):
    """Two arrays that go to the device together."""

    ids: Any
    values: Any


def test_groups_arrive_as_the_same_tuples_with_tensors_of_the_same_dtypes() -> None:
    first = Pair(np.array([3, 1], np.int64), np.array([0.5], np.float64))
    second = Pair(np.zeros(0, np.int64), np.array([-0.0, 2.0**-1074], np.float64))
    uploaded = upload_groups(CPU, first, second)
    assert [type(group) for group in uploaded] == [Pair, Pair]
    for group, expected in zip(uploaded, (first, second), strict=True):
        for tensor, array in zip(group, expected, strict=True):
            assert tensor.numpy().dtype == array.dtype
            assert tensor.numpy().tobytes() == array.tobytes()
