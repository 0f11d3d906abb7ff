"""Files of host blocks: what is written, what a later engine reads, and answers that come late.

Random worlds with files are in tests/core/test_host_cache.py, the format of a file in
tests/models/test_block_files.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import blake2b
from pathlib import Path
from typing import Any

import pytest

from forge.config import DiskTier, HostTier, LoadCosts
from forge.engine import Engine
from forge.errors import InvalidConfig, PolicyError
from forge.invariants import PlanAudit, audit, audit_drained
from forge.models.block_files import BlockFiles
from forge.models.file_moves import FileMoves
from forge.models.hash import HashModel
from forge.models.host_blocks import HostBlocks, check_moves
from forge.policy import FCFS, Candidate, PolicyContext
from forge.recording import RecordingWriter, build_header, plan_digest
from forge.request import CachedTokens, Request, SamplingParams
from forge.seam import FileAnswer, HostFile, HostLoad, HostStore, StepPlan
from forge.sim.replay import replay
from tests.core.builders import config, next_plan
from tests.core.reference import compute_expected
from tests.core.test_host_cache import ALWAYS, Run
from tests.core.worlds import ChoiceResult, FaultyStore, RecordingModel, check_choice

DISK = DiskTier(max_files=100, max_moves=8, max_wait_plans=6)
TIER = replace(ALWAYS, disk=DISK)
A, B = tuple(range(1, 10)), tuple(range(21, 34))


class Files(FileMoves):
    """Files in memory without faults, whose answers are `late` plans late.

    store   contents by key
    """

    def __init__(self, store: FaultyStore | None = None) -> None:
        self.store = store or FaultyStore(0)
        self.late: Callable[[HostFile], int] = lambda file: 0
        super().__init__(self.store, lateness=lambda step, file: self.late(file))


def run_with_files(tier: HostTier = TIER, *, blocks: int = 4, **options: object) -> Run:
    """Return a run whose files have A: it was spilled, and neither pool has it."""
    files = Files()
    earlier = Run(tier, blocks=blocks, files=files)
    earlier.serve(A, (50,), (51,), (52,))
    assert set(files.store.contents) == set(earlier.hashes(A))
    run = Run(tier, blocks=blocks, files=Files(files.store), **options)
    run.scheduler.disk_cache.add_keys(files.store.contents)
    return run


def files_of(run: Run) -> Files:
    """Return the run's files."""
    assert isinstance(run.model._files, Files)
    return run.model._files


def test_a_prefix_in_files_is_fetched_loaded_and_not_computed() -> None:
    run = run_with_files()
    fetch, load, rest = run.serve(A)
    assert [file.key for file in fetch.fetches] == run.hashes(A)
    assert not (fetch.rows or fetch.loads) and len(load.loads) == 2 and not load.rows
    assert [(row.start, row.end) for row in rest.rows] == [(8, 9)]
    assert run.scheduler.disk_cache.num_fetched_blocks == 2
    assert run.scheduler.cached_tokens == CachedTokens(disk=8)
    assert run.scheduler.num_uncached_tokens == 1


def test_blocks_that_were_fetched_for_another_request_come_from_host_memory() -> None:
    """The first request ends before the answers come."""
    run = run_with_files()
    files_of(run).late = lambda file: 1
    run.add(A)
    run.step()
    run.scheduler.abort(0)
    run.serve((50,), (51,), A)
    assert run.scheduler.cached_tokens == CachedTokens(host=8)


def test_a_file_that_cannot_be_written_is_counted() -> None:
    class FullStore(FaultyStore):
        def write(self, key: bytes, content: bytes) -> bool:
            return False

    run = Run(TIER, files=Files(FullStore(0)))
    run.serve(A, (50,), (51,), (52,))
    disk_cache = run.scheduler.disk_cache
    counts = (disk_cache.num_failed_spills, disk_cache.num_spilled_blocks, disk_cache.num_files)
    assert counts == (2, 0, 0)


def test_what_comes_from_a_file_is_not_written_again() -> None:
    run = run_with_files()
    plans = run.serve(A, (50,), (51,), (52,))
    assert not any(plan.spills for plan in plans)


def test_a_block_is_spilled_once_and_not_while_it_is_in_flight() -> None:
    run = Run(TIER, files=Files())
    files_of(run).late = lambda file: 3
    run.serve(A)
    plans = run.serve((50,), (51,), (52,), (53,), (54,))
    assert [len(plan.spills) for plan in plans] == [0, 2, 0, 0, 0]
    assert run.scheduler.disk_cache.num_spilled_blocks == 2


def test_two_salts_share_no_file() -> None:
    run = run_with_files()
    (plan,) = run.serve(A, cache_salt="other")
    assert not plan.fetches and plan.num_tokens == len(A)


def test_others_go_on_while_a_file_is_read() -> None:
    run = run_with_files(blocks=8)
    files_of(run).late = lambda file: 3
    run.add((60,), max_tokens=12)
    run.step()
    run.add(A)
    plans = [run.step() for _ in range(5)]
    assert plans[0].fetches and all(plan.rows for plan in plans)
    assert [len(plan.loads) for plan in plans] == [0, 0, 0, 0, 2]
    run.drain()


def test_a_second_request_waits_for_the_same_fetch() -> None:
    run = run_with_files(blocks=8)
    files_of(run).late = lambda file: 2
    run.add(A)
    run.add(A)
    plans = [run.step() for _ in range(4)]
    assert [len(plan.fetches) for plan in plans] == [2, 0, 0, 0]
    assert len(plans[3].loads) == 2
    run.drain()


def test_a_file_that_is_gone_is_computed_and_not_fetched_again() -> None:
    run = run_with_files()
    files_of(run).store.contents.pop(run.hashes(A)[0])
    fetch, rest = run.serve(A)
    assert len(fetch.fetches) == 2 and rest.num_tokens == len(A)
    assert run.scheduler.disk_cache.num_missed_blocks == 1
    run.serve(tuple(range(100, 116)), tuple(range(200, 216)))
    assert run.hashes(A)[0] not in run.scheduler.disk_cache._keys


def test_an_answer_that_never_comes_is_given_up() -> None:
    run = run_with_files()
    files_of(run).late = lambda file: 1000
    plans = run.serve(A)
    assert [bool(plan.rows) for plan in plans] == [False] * 6 + [True]
    assert plans[0].file_epoch == 0 and plans[-1].file_epoch == 1
    assert not files_of(run).fetching and run.scheduler.host_cache.num_held_blocks == 0
    audit(run.scheduler)


def test_an_idle_engine_computes_what_is_quicker_to_compute() -> None:
    """Eight tokens take 8 ns: two blocks of 3 ns are quicker to read, two of 4 ns are not."""
    costs = LoadCosts(0, 0, 1)
    for fetch_block_ns, is_fetched in ((3, True), (4, False)):
        disk = replace(DISK, fetch_block_ns=fetch_block_ns)
        run = run_with_files(replace(TIER, costs=costs, disk=disk))
        assert bool(run.serve(A)[0].fetches) == is_fetched


def test_an_idle_engine_loads_from_host_memory_and_refuses_a_disk_that_is_slower() -> None:
    """A has two blocks of four tokens, which take 44 ns to compute, 10 to load, 50 to read."""
    costs = LoadCosts(0, 5, 1, 1000)
    tier = replace(TIER, costs=costs, disk=replace(DISK, fetch_block_ns=25))
    run = run_with_files(tier)
    (cold,) = run.serve(A)
    assert not cold.fetches and cold.num_tokens == len(A)
    run.serve((50,), (51,), (52,))  # A's blocks are stored
    run.scheduler.pool.reset_cache()  # as if others had taken the blocks of the device
    assert len(run.scheduler.host_cache.lookup(run.hashes(A))) == 2
    load, rest = run.serve(A)
    assert (len(load.loads), len(load.fetches), rest.num_tokens) == (2, 0, 1)
    quick = run_with_files(replace(tier, disk=replace(DISK, fetch_block_ns=16)))
    assert quick.serve(A)[0].fetches


def test_while_others_run_a_slow_disk_is_read() -> None:
    tier = replace(TIER, costs=LoadCosts(0, 5, 1), disk=replace(DISK, fetch_block_ns=10**9))
    run = run_with_files(tier, blocks=8)
    run.add((60,), max_tokens=6)
    run.step()
    run.add(A)
    assert run.step().fetches
    run.drain()


def test_blocks_of_a_file_after_others_take_longer_to_compute() -> None:
    """A's first block is in the host pool: the second has 4 tokens and 26 pairs, of 1 ns each."""
    for fetch_block_ns, is_fetched in ((29, True), (30, False)):
        disk = replace(DISK, fetch_block_ns=fetch_block_ns)
        run = run_with_files(replace(TIER, costs=LoadCosts(0, 0, 1, 1000), disk=disk))
        first = run.hashes(A)[0]
        host_cache = run.scheduler.host_cache
        host_block = host_cache.reserve(first)
        assert host_block is not None
        host_cache.end_reservation(host_block, first, is_good=True)
        run.add(A)
        plan = next_plan(run.scheduler)
        assert [file.key for file in plan.fetches] == run.hashes(A)[1:2] * is_fetched


def test_a_sequence_of_a_failed_step_reads_no_file() -> None:
    run = run_with_files()
    run.add(A)
    assert run.step().fetches
    assert run.plan().loads
    run.scheduler.void("a test")
    audit(run.scheduler)
    plans = []
    while run.scheduler.has_work:
        plans.append(run.step())
    assert [(len(plan.fetches), len(plan.loads)) for plan in plans] == [(0, 0)]
    run.drain()


@pytest.mark.long
def test_a_slow_disk_loses_no_file_while_steps_are_quick() -> None:
    """64 files of 9 MiB from a disk of 0.25 GB/s take 2.4 s: 960 plans of 2.5 ms."""
    run = run_with_files(replace(TIER, disk=DiskTier(max_files=100)), blocks=300)
    files_of(run).late = lambda file: 960
    run.add((60,), max_tokens=1000)
    run.step()
    run.add(A)
    run.drain()
    disk_cache = run.scheduler.disk_cache
    assert (disk_cache.num_fetched_blocks, disk_cache.num_dropped_moves) == (2, 0)
    assert run.scheduler.cached_tokens == CachedTokens(disk=8)


def test_no_more_files_move_at_a_time_than_allowed() -> None:
    """A third block is fetched when one of the first two has been answered."""
    files = Files()
    long = tuple(range(1, 18))
    Run(TIER, blocks=6, files=files).serve(long, *[(50 + i,) for i in range(4)])
    run = Run(replace(TIER, disk=replace(DISK, max_moves=2)), blocks=6, files=Files(files.store))
    run.scheduler.disk_cache.add_keys(files.store.contents)
    plans = run.serve(long)
    assert [len(plan.fetches) for plan in plans] == [2, 2, 0, 0]
    assert [len(plan.loads) for plan in plans] == [0, 0, 4, 0]


def test_further_files_are_fetched_while_the_first_one_is_read() -> None:
    """Two at a time. The first file is three plans late, and each other one answers at once."""
    files = Files()
    long = tuple(range(1, 18))
    Run(TIER, blocks=6, files=files).serve(long, *[(50 + i,) for i in range(4)])
    run = Run(replace(TIER, disk=replace(DISK, max_moves=2)), blocks=6, files=Files(files.store))
    run.scheduler.disk_cache.add_keys(files.store.contents)
    first = run.hashes(long)[0]
    files_of(run).late = lambda file: 3 if file.key == first else 0
    plans = run.serve(long)
    assert [len(plan.fetches) for plan in plans] == [2, 1, 1, 0, 0, 0]
    assert [len(plan.loads) for plan in plans] == [0, 0, 0, 0, 4, 0]


def test_the_rest_of_a_prefix_is_judged_with_what_was_requested_before() -> None:
    """Three blocks are worth a fetch, and fewer are not. Of two that are read one has come."""
    disk_cache = Run(
        replace(TIER, disk=replace(DISK, max_moves=2), min_loaded_blocks=3)
    ).scheduler.disk_cache
    hashes = [bytes([number]) * 64 for number in range(3)]
    disk_cache.add_keys(hashes)
    assert disk_cache.request_fetches(7, 0, hashes, is_idle=True)
    _, fetches = disk_cache.plan_moves(0)
    assert [file.key for file in fetches] == hashes[:2]
    assert disk_cache.request_fetches(7, 0, hashes, is_idle=True), "it waits without room for more"
    disk_cache.commit_answers([FileAnswer(0, fetches[1].host_block, is_good=True)])
    assert disk_cache.request_fetches(7, 0, hashes, is_idle=True)
    assert [file.key for file in disk_cache.plan_moves(1)[1]] == hashes[2:]


def test_a_block_that_is_being_stored_ends_the_run_that_is_fetched() -> None:
    """Its host block is reserved: it comes from the device sooner than from a file."""
    scheduler = Run(TIER).scheduler
    hashes = [bytes([number]) * 64 for number in range(3)]
    scheduler.disk_cache.add_keys(hashes)
    assert scheduler.host_cache.reserve(hashes[1]) is not None
    assert scheduler.disk_cache.request_fetches(7, 0, hashes, is_idle=True)
    assert [file.key for file in scheduler.disk_cache.plan_moves(0)[1]] == hashes[:1]


def test_a_sequence_does_not_wait_for_a_fetch_without_a_free_host_block() -> None:
    scheduler = Run(replace(TIER, num_blocks=2)).scheduler
    hashes = [bytes([number]) * 64 for number in range(3)]
    scheduler.disk_cache.add_keys(hashes)
    host_blocks = [scheduler.host_cache.reserve(bytes([number]) * 64) for number in (8, 9)]
    assert host_blocks == [0, 1]
    assert not scheduler.disk_cache.request_fetches(7, 0, hashes, is_idle=True)
    assert not scheduler.disk_cache.needs_plan
    scheduler.host_cache.end_reservation(0, bytes([8]) * 64, is_good=False)
    assert scheduler.disk_cache.request_fetches(7, 0, hashes, is_idle=True)
    assert [file.key for file in scheduler.disk_cache.plan_moves(0)[1]] == hashes[:1]


def test_a_spill_that_was_dropped_is_planned_again() -> None:
    scheduler = Run(TIER).scheduler
    key = bytes(64)
    host_block = scheduler.host_cache.reserve(key)
    assert host_block is not None
    scheduler.host_cache.end_reservation(host_block, key, is_good=True)
    for step in range(2):
        spills, _ = scheduler.disk_cache.plan_moves(step)
        assert spills == (HostFile(host_block, key),)
        scheduler.disk_cache.drop()


def test_the_keys_that_are_remembered_are_bounded() -> None:
    run = Run(replace(TIER, disk=replace(DISK, max_files=2)), files=Files())
    run.scheduler.disk_cache.add_keys([b"1", b"2", b"1", b"3"])
    assert list(run.scheduler.disk_cache._keys) == [b"1", b"3"]
    assert run.scheduler.disk_cache.num_files == 2


def test_a_host_block_that_is_being_written_to_a_file_keeps_its_content() -> None:
    """Its content is read when the plan begins, but a device may read it until the answer."""
    run = Run(replace(TIER, num_blocks=2), blocks=8, files=Files())
    files_of(run).late = lambda file: 4
    run.serve(A, (50,), (51,))
    moves = run.scheduler.disk_cache._moves
    assert len(moves) == 2 and run.scheduler.host_cache._pins.total() == 2
    plans = run.serve(tuple(range(200, 209)), (52,))
    assert not any(plan.stores for plan in plans)
    run.serve((53,), (54,), (55,))
    assert run.stores() == 4


def test_an_abort_while_a_file_is_read_leaves_the_answer_to_the_host_pool() -> None:
    run = run_with_files()
    files_of(run).late = lambda file: 1
    run.add(A)
    run.step()
    run.scheduler.abort(0)
    audit_drained(run.scheduler)
    run.serve((50,), (51,))
    assert len(run.scheduler.host_cache.lookup(run.hashes(A))) == 2
    assert run.serve(A)[0].loads


@pytest.mark.parametrize("event", ["void", "reset_prefix_cache", "resize_host"])
def test_an_answer_of_before_a_drop_changes_nothing(event: str) -> None:
    """The model has answered, and the host block is used for something else meanwhile."""
    run = run_with_files(blocks=8)
    run.add(A)
    plan, output = run.plan(), run.output
    assert len(output.answers) == 2 and all(answer.is_good for answer in output.answers)
    arguments = {"void": ("a test",), "reset_prefix_cache": (), "resize_host": (16,)}[event]
    getattr(run.scheduler, event)(*arguments)
    run.scheduler.commit(plan, output)
    audit(run.scheduler)
    assert run.scheduler.host_cache.num_held_blocks == 0
    assert run.scheduler.disk_cache.epoch == 1
    assert run.scheduler.disk_cache.num_dropped_moves == 2
    run.drain()


def test_an_answer_counts_for_the_move_of_its_step_alone() -> None:
    """An answer of another step is of a move that was dropped."""
    run = run_with_files()
    files_of(run).late = lambda file: 9
    run.add(A)
    plan = run.plan()
    disk_cache = run.scheduler.disk_cache
    host_block = plan.fetches[0].host_block
    disk_cache.commit_answers([FileAnswer(plan.step + 1, host_block, is_good=True)])
    assert disk_cache.is_fetching and not run.scheduler.host_cache.num_held_blocks
    disk_cache.commit_answers([FileAnswer(plan.step, host_block, is_good=True)])
    disk_cache.commit_answers([FileAnswer(plan.step, host_block, is_good=True)])
    assert run.scheduler.host_cache.num_held_blocks == 1


def test_a_sequence_fetches_a_file_once() -> None:
    """The fetches are dropped before they are answered, and it computes its prefix."""
    run = run_with_files(blocks=8)
    files_of(run).late = lambda file: 3
    run.add((60,), max_tokens=4)
    run.step()
    run.add(A)
    assert len(run.step().fetches) == 2
    run.scheduler.disk_cache.drop()
    plan = run.step()
    assert not plan.fetches and plan.num_tokens == 1 + len(A)
    run.drain()


@pytest.mark.parametrize("max_moves", [2, 3, 8])
def test_slow_spills_leave_room_for_fetches(max_moves: int) -> None:
    """Spills of a prompt are never answered. A is fetched all the same."""
    disk = replace(DISK, max_moves=max_moves, max_wait_plans=1000)
    run = run_with_files(replace(TIER, disk=disk), blocks=8)
    slow = tuple(range(100, 129))
    slow_keys = run.hashes(slow)
    files_of(run).late = lambda file: 900 if file.key in slow_keys else 0
    run.serve(slow, (50,), (51,))
    spilled = [file for plan in run.served.plans for file in plan.spills]
    assert len(spilled) == (max_moves + 1) // 2
    plans = run.serve(A)
    assert [file.key for plan in plans for file in plan.fetches] == run.hashes(A)
    assert sum(len(plan.loads) for plan in plans) == 2


def refuse_policy_after_a_fetch(run: Run) -> None:
    """Let the policy choose A, which requests its files, and raise before a plan is made."""
    run.add(A)
    run.add((70,))
    choices = iter([0])

    def admit(waiting: Sequence[Candidate], context: PolicyContext) -> Candidate:
        for index in choices:
            return waiting[index]
        raise ZeroDivisionError

    run.scheduler.policy = FCFS._replace(admit=admit)
    with pytest.raises(PolicyError, match="ZeroDivisionError"):
        run.scheduler.schedule()
    run.scheduler.policy = FCFS


def test_fetches_of_a_plan_that_the_policy_prevents_are_in_the_next_one() -> None:
    run = run_with_files(blocks=8)
    refuse_policy_after_a_fetch(run)
    audit(run.scheduler)
    plans = [run.step(), run.step()]
    assert [file.key for file in plans[0].fetches] == run.hashes(A)
    assert not plans[1].fetches and len(plans[1].loads) == 2
    run.drain()


def test_fetches_that_no_plan_contains_are_given_up_when_their_sequence_ends() -> None:
    run = run_with_files(blocks=8)
    refuse_policy_after_a_fetch(run)
    run.scheduler.abort(0)
    run.scheduler.abort(1)
    audit_drained(run.scheduler)
    assert not any(plan.fetches for plan in run.serve((71,)))


def test_an_engine_without_a_disk_tier_refuses_keys_of_files() -> None:
    for tier in (None, ALWAYS):
        engine = Engine(HashModel(num_blocks=4, block_size=4), config(host_tier=tier))
        with pytest.raises(InvalidConfig, match=r"host_tier: .* Set HostTier\.disk"):
            engine.add_disk_keys([KEY])


def test_a_reset_reads_no_file_of_before() -> None:
    run = run_with_files()
    run.scheduler.reset_prefix_cache()
    (plan,) = run.serve(A)
    assert not plan.fetches


# A folder, threads, restarts.


class PromptThreads(ThreadPoolExecutor):
    """Threads whose work is done when it has been submitted: each answer comes at once."""

    def submit(self, *args: Any, **options: Any) -> Any:
        future = super().submit(*args, **options)
        future.exception()
        return future


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with PromptThreads(2) as threads:
        yield threads


LAYOUT = blake2b(b"HashModel, 4 bytes a token").digest()
PROMPTS = [tuple(range(10 * i + 1, 10 * i + 18)) for i in range(4)]


def serve_from(
    folder: Path,
    executor: ThreadPoolExecutor,
    layout: bytes = LAYOUT,
    during: Callable[[int], object] = lambda step: None,
) -> Engine:
    """Serve all prompts on a new engine and a new model, compare the outputs, and return it."""
    store = BlockFiles(folder, layout, 10**6)
    config = Run(TIER, blocks=8).config
    model = HashModel(num_blocks=8, block_size=4, files=FileMoves(store, executor))
    recorder = RecordingModel(model)
    engine = Engine(recorder, replace(config, depth=2, max_model_len=64))
    recorder.on_plan = PlanAudit(engine.scheduler)
    engine.add_disk_keys(store.keys())
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    requests = [Request(i, PROMPTS[i % 4], params) for i in range(12)]
    for step, request in enumerate(requests):
        during(step)
        engine.submit(request)
        choice = ChoiceResult()
        while engine.has_work:
            for delta in engine.step():
                choice.add(delta)
            assert recorder.failure is None
            audit(engine)
        check_choice(choice, compute_expected(model, config, request), f"request {request.id}")
    executor.submit(int).result()
    store.close()
    return engine


def test_a_restarted_engine_finds_its_prefixes_in_the_folder(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    first = serve_from(tmp_path / "kv", executor).scheduler
    assert first.disk_cache.num_spilled_blocks > 4
    second = serve_from(tmp_path / "kv", executor).scheduler
    assert second.disk_cache.num_fetched_blocks > 4 and second.num_loaded_tokens > 16


def test_threads_that_answer_at_any_time_change_no_output(tmp_path: Path) -> None:
    """What is found depends on the machine. `serve_from` compares the outputs."""
    for _ in range(3):
        with ThreadPoolExecutor(3) as threads:
            serve_from(tmp_path / "kv", threads)


def test_a_model_of_another_layout_finds_nothing_in_the_folder(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    serve_from(tmp_path / "kv", executor)
    other = serve_from(tmp_path / "kv", executor, blake2b(b"other").digest()).scheduler
    # What it fetches are files that it has written.
    assert other.disk_cache.num_missed_blocks > 0


def test_a_folder_that_vanishes_or_is_damaged_only_slows_down(
    tmp_path: Path, executor: ThreadPoolExecutor
) -> None:
    folder = tmp_path / "kv"
    serve_from(folder, executor)

    def damage(step: int) -> None:
        for index, path in enumerate(sorted(folder.iterdir())):
            if path.name == ".lock":
                continue
            if step == 1 and index % 2:
                path.write_bytes(path.read_bytes()[:-1])
            if step == 3 and index % 3 == 0:
                path.write_bytes(bytes(300))
            if step == 6:
                path.unlink(missing_ok=True)

    assert serve_from(folder, executor, during=damage).scheduler.disk_cache.num_missed_blocks


# The model.


def plan_of(step: int, **fields: object) -> StepPlan:
    return StepPlan(step, (), 8, 4, num_host_blocks=4, **fields)  # type: ignore[arg-type]


KEY = b"k" * 64


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        ({"stores": (HostStore(1, 2),)}, "is to a host block of a file move"),
        ({"loads": (HostLoad(0, 0, 1, 2),)}, "reads host block 2, which is fetched"),
        ({"fetches": (HostFile(2, KEY),)}, "no host block of its own"),
        ({"spills": (HostFile(2, KEY),)}, "no host block of its own"),
        ({"fetches": (HostFile(4, KEY),)}, "no host block of its own"),
        ({"spills": (HostFile(3, KEY),)}, "nothing was stored"),
    ],
)
def test_a_plan_that_touches_a_host_block_of_a_file_move_is_refused(
    fields: dict[str, object], problem: str
) -> None:
    files = Files()
    files.late = lambda file: 9
    model = HashModel(num_blocks=8, block_size=4, files=files)
    model.forward(plan_of(0, fetches=(HostFile(2, KEY),)))
    with pytest.raises(ValueError, match=problem):
        model.forward(plan_of(1, **fields))


def test_a_spilled_host_block_may_be_loaded_and_not_stored_to() -> None:
    check_moves(plan_of(0, loads=(HostLoad(0, 0, 1, 2),)), {}, spilling={2})
    with pytest.raises(ValueError, match="is to a host block of a file move"):
        check_moves(plan_of(0, stores=(HostStore(1, 2),)), {}, spilling={2})


@pytest.mark.parametrize("num_bytes", [0, 12, 15, 20])
def test_a_content_of_another_length_is_a_miss(num_bytes: int) -> None:
    files = Files()
    files.store.contents[KEY] = bytes(num_bytes)
    model = HashModel(num_blocks=8, block_size=4, files=files)
    output = model.forward(plan_of(0, fetches=(HostFile(2, KEY),))).result()
    assert output.answers == (FileAnswer(0, 2, is_good=False),)


class _NeverExecutor(Executor):
    """Keeps what was submitted and runs none of it, as threads that a disk holds up."""

    def __init__(self) -> None:
        self.num_submitted = 0

    def submit(self, *_: object) -> Future[Any]:  # type: ignore[override]  # nothing is called
        self.num_submitted += 1
        return Future()


def test_a_disk_that_hangs_holds_a_bounded_number_of_contents() -> None:
    """Each epoch drops 40 moves that go on. From 64 on new ones fail at once."""
    executor = _NeverExecutor()
    moves = FileMoves(FaultyStore(0), executor)
    host_blocks = HostBlocks(block_bytes=16)
    host_blocks.contents += [bytearray(16)] * 40
    spills = tuple(HostFile(block, bytes(64)) for block in range(40))
    for step in range(9):
        plan = StepPlan(step, (), 8, 4, num_host_blocks=40, spills=spills, file_epoch=step)
        moves.begin(plan, host_blocks)
    assert executor.num_submitted == 80
    answers = moves.end(plan)
    assert answers == tuple(FileAnswer(8, block, is_good=False) for block in range(40))


def test_moves_of_an_earlier_epoch_are_not_answered() -> None:
    files = Files()
    files.late = lambda file: 1
    files.store.contents[KEY] = bytes(16)
    model = HashModel(num_blocks=8, block_size=4, files=files)
    model.forward(plan_of(0, fetches=(HostFile(2, KEY),)))
    later = plan_of(1, stores=(HostStore(1, 2),), file_epoch=1)
    assert model.forward(later).result().answers == ()


# Recording and configuration.


@pytest.mark.parametrize("seed", range(1, 7))
def test_a_recording_replays_with_its_answers(seed: int) -> None:
    """Files fail, and answer late or never, by the seed."""
    store = FaultyStore(seed)
    files = FileMoves(store, lateness=store.lateness)
    model, lines = HashModel(num_blocks=6, block_size=4, files=files), list[str]()
    tier = replace(TIER, num_blocks=4)
    config = replace(Run(tier, blocks=6).config, depth=1 + seed % 2, max_model_len=64)
    header = build_header(config, model.vocab_size(), model.eos_token(), "fcfs", "1")
    engine = Engine(model, config, recorder=RecordingWriter(lines.append, lambda: 0, header))
    engine.add_disk_keys([KEY])
    params = SamplingParams(max_tokens=3, ignore_eos=True)
    for index in range(16):
        engine.submit(Request(index, PROMPTS[index % 4][: 9 + index % 3], params))
        for _ in range(3):
            engine.step()
        if index == 9:
            engine.reset_prefix_cache()
    while engine.has_work:
        engine.step()
    assert engine.scheduler.disk_cache.num_fetched_blocks
    result = replay(lines)
    assert result.difference is None and result.steps == engine.num_steps
    assert '"answers":[[' in "".join(lines) and KEY.hex() in lines[1]


def test_the_digest_of_a_plan_includes_its_files() -> None:
    plan = plan_of(0, spills=(HostFile(1, KEY),), fetches=(HostFile(2, KEY),))
    others = [
        plan._replace(spills=()),
        plan._replace(fetches=()),
        plan._replace(spills=(HostFile(3, KEY),)),
        plan._replace(fetches=(HostFile(2, KEY[::-1] + b"1"),)),
        plan._replace(file_epoch=1),
    ]
    assert len({plan_digest(each) for each in (plan, *others)}) == 1 + len(others)


@pytest.mark.parametrize(
    "options",
    [{"max_files": -1}, {"max_files": 1, "max_moves": 0}, {"max_files": 1, "max_wait_plans": 0}],
)
def test_a_disk_tier_out_of_range_is_refused(options: dict[str, int]) -> None:
    with pytest.raises(InvalidConfig, match=r"disk: .* is not an integer from"):
        DiskTier(**options)
