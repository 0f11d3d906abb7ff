"""Replica table: replicas join, drain, leave and die, and no request is forgotten."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from forge.kv_events import DEVICE, BlockStored
from forge.routing.replica_table import (
    Decision,
    DecisionFeed,
    EventFeed,
    IndexFeed,
    LostRequests,
    ReplicaTable,
)
from forge.routing.router import LeastLoaded, PrefixAware, ReplicaLoad, Router

FOUR = (b"a", b"b", b"c", b"d")


def create_table(
    num_replicas: int, router: Router | None = None, feed: IndexFeed | None = None
) -> ReplicaTable:
    """Return a table of replicas 0, 1, ... without requests."""
    table = ReplicaTable(router or LeastLoaded(), feed or DecisionFeed())
    for replica_id in range(num_replicas):
        table.join(replica_id, max_blocks=100)
    return table


def route(table: ReplicaTable, request_id: int, hashes: Sequence[bytes] = FOUR) -> int | None:
    """Route a request of blocks of ten tokens; return its replica."""
    decision = table.route(request_id, hashes, 10 * len(hashes))
    return None if decision is None else decision.replica_id


def test_requests_count_until_they_end_and_their_prompts_until_they_begin() -> None:
    table = create_table(1)
    route(table, 7)
    assert table.load(0) == ReplicaLoad(0, 1, 40)
    assert table.replica_of(7) == 0
    table.begin(7)
    table.begin(7)
    assert table.load(0) == ReplicaLoad(0, 1, 0)
    route(table, 8, (b"x",))
    table.end(7)
    table.end(8)
    assert table.load(0) == ReplicaLoad(0, 0, 0)
    assert table.num_decisions == 2


def test_tokens_that_the_replica_holds_are_no_work() -> None:
    table = create_table(2, PrefixAware())
    assert table.route(0, FOUR, 40) == Decision(0, 0)
    assert table.route(1, (*FOUR, b"e"), 50) == Decision(0, 4)
    assert table.load(0).num_prefill_tokens == 40 + 10


def test_a_table_fed_by_events_knows_a_prefix_when_its_event_comes() -> None:
    table = create_table(2, PrefixAware(), EventFeed())
    assert table.route(0, FOUR, 40) == Decision(0, 0)
    assert table.route(1, FOUR, 40) == Decision(1, 0)
    table.follow(1, [BlockStored(FOUR[:2], None, (), 10, DEVICE)])
    assert table.route(2, FOUR, 40) == Decision(1, 2)


def test_a_table_fed_by_decisions_ignores_events() -> None:
    table = create_table(2, PrefixAware())
    table.follow(1, [BlockStored(FOUR, None, (), 10, DEVICE)])
    assert [route(table, n) for n in range(3)] == [0, 0, 0]


def test_a_draining_replica_gets_no_request_and_ends_those_that_it_has() -> None:
    table = create_table(2)
    assert [route(table, n) for n in range(2)] == [0, 1]
    table.drain(0)
    table.drain(0)
    assert (table.active_ids, table.draining_ids) == ((1,), (0,))
    assert [route(table, n) for n in range(2, 5)] == [1, 1, 1]
    table.begin(0)
    table.end(0)
    assert table.load(0).num_requests == 0
    assert table.leave(0) == LostRequests((), ())
    assert table.draining_ids == ()


def test_a_replica_that_leaves_returns_its_requests_by_whether_they_have_begun() -> None:
    table = create_table(2)
    assert [route(table, n) for n in range(6)] == [0, 1, 0, 1, 0, 1]
    table.begin(2)
    table.end(4)
    assert table.leave(0) == LostRequests(waiting=(0,), started=(2,))
    assert table.active_ids == (1,)
    assert route(table, 0) == 1
    assert table.load(1).num_requests == 4


def test_no_replica_accepts_requests_before_one_joins() -> None:
    table = create_table(0)
    assert route(table, 0) is None
    assert table.num_decisions == 0
    table.join(3, max_blocks=5)
    assert route(table, 0) == 3


def test_a_request_may_be_for_some_of_the_replicas_only() -> None:
    """Replica 0 holds the prompt. Where it is no candidate, the others are taken in turn."""
    table = create_table(3, PrefixAware())
    assert route(table, 0) == 0
    assert table.route(1, FOUR, 40, candidate_ids=[1, 2]) == Decision(2, 0)
    assert table.route(2, FOUR, 40, candidate_ids=[1]) == Decision(1, 0)
    assert table.route(3, FOUR, 40, candidate_ids=[7]) is None
    assert table.num_decisions == 3


def test_a_replica_that_joins_again_is_empty_and_keeps_its_place() -> None:
    table = create_table(3, PrefixAware())
    route(table, 0)
    table.leave(0)
    table.join(0, max_blocks=100)
    assert table.active_ids == (0, 1, 2)
    assert table.index.num_blocks(0) == 0
    assert table.load(0) == ReplicaLoad(0)


def test_a_request_is_routed_once_at_a_time() -> None:
    table = create_table(1)
    route(table, 0)
    with pytest.raises(AssertionError, match="request 0 is routed already"):
        route(table, 0)


@pytest.mark.parametrize("feed", [DecisionFeed(), EventFeed()])
def test_every_request_is_on_one_replica_until_it_ends(feed: IndexFeed) -> None:
    """Replicas join, drain, leave and die for 3,000 random steps; a plain record agrees."""
    rng = Random(3)
    table = create_table(0, PrefixAware(), feed)
    where: dict[int, int] = {}
    started: set[int] = set()
    reached: dict[str, int] = dict.fromkeys(("moved", "failed", "drained", "none"), 0)
    for step in range(3000):
        present = table.active_ids + table.draining_ids
        if len(present) < 4 and rng.random() < 0.1:
            table.join(min({*range(5)} - {*present}), max_blocks=8)
        elif present and rng.random() < 0.03:
            gone = rng.choice(present)
            lost = table.leave(gone)
            assert {*lost.waiting, *lost.started} == {i for i, r in where.items() if r == gone}
            assert {*lost.started} == {i for i, r in where.items() if r == gone} & started
            where = {i: r for i, r in where.items() if r != gone}
            reached["moved"] += len(lost.waiting)
            reached["failed"] += len(lost.started)
        elif table.active_ids and rng.random() < 0.03:
            table.drain(rng.choice(table.active_ids))
            reached["drained"] += 1
        if where and rng.random() < 0.5:
            request_id = rng.choice(list(where))
            if rng.random() < 0.5:
                table.begin(request_id)
                started.add(request_id)
            else:
                table.end(request_id)
                del where[request_id]
        replica = route(table, step, tuple(rng.choices(FOUR, k=rng.randint(0, 4))))
        if replica is None:
            assert not table.active_ids
            reached["none"] += 1
        else:
            assert replica in table.active_ids
            where[step] = replica
        for each in table.active_ids + table.draining_ids:
            mine = [i for i, r in where.items() if r == each]
            assert table.load(each).num_requests == len(mine)
            assert table.index.num_blocks(each) <= 8
            if started.issuperset(mine):
                assert table.load(each).num_prefill_tokens == 0
    assert min(reached.values()) > 20
