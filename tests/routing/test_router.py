"""Routers: a request, the loads of replicas and what they hold in, a replica out."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

import pytest

from forge.blocks import BlockHash
from forge.errors import InvalidConfig
from forge.routing.router import (
    ROUTERS,
    LeastLoaded,
    LeastWork,
    PrefixAware,
    PrefixLookup,
    ReplicaLoad,
    RoundRobin,
    Router,
    RoutingRequest,
    SessionOrPrefix,
    SessionSticky,
    find_router,
)

TEN_BLOCKS = tuple(bytes([index]) for index in range(10))


def request(number: int = 0, tenant: str = "", session_id: str = "") -> RoutingRequest:
    """Return a request of ten blocks of 16 tokens, and one token more."""
    return RoutingRequest(number, TEN_BLOCKS, 161, tenant, session_id)


def loads(*num_requests: int) -> tuple[ReplicaLoad, ...]:
    """Return replicas 0, 1, ... with so many requests."""
    return tuple(ReplicaLoad(index, count) for index, count in enumerate(num_requests))


def holding(*lengths: int) -> PrefixLookup:
    """Return a lookup by which replicas hold so many first blocks of the request."""

    def find_prefix(hashes: Sequence[BlockHash]) -> Sequence[int]:
        assert tuple(hashes) == TEN_BLOCKS
        return lengths

    return find_prefix


def test_round_robin_takes_the_replicas_in_turn() -> None:
    replicas = loads(9, 0, 0)
    found = [RoundRobin().route(request(n), replicas, holding(0, 9, 0)) for n in range(5)]
    assert found == [0, 1, 2, 0, 1]


def test_least_loaded_takes_the_fewest_requests_and_equal_replicas_in_turn() -> None:
    route = LeastLoaded().route
    assert route(request(), loads(3, 1, 2), holding(9, 0, 0)) == 1
    assert [route(request(n), loads(1, 1, 2), holding(0, 0, 0)) for n in range(4)] == [0, 1, 0, 0]


def test_prefix_aware_takes_the_longest_prefix() -> None:
    assert PrefixAware().route(request(), loads(2, 4, 0), holding(3, 6, 2)) == 1


def test_prefix_aware_takes_the_fewest_requests_of_those_with_the_same_prefix() -> None:
    assert PrefixAware().route(request(), loads(2, 1, 0), holding(6, 6, 2)) == 1


@pytest.mark.parametrize(("num_requests", "chosen"), [(4, 1), (5, 0)])
def test_prefix_aware_skips_a_replica_with_too_many_more_requests(
    num_requests: int, chosen: int
) -> None:
    """Three more are allowed. Then the next longest prefix is taken, not the lowest load."""
    router = PrefixAware(max_imbalance=3)
    assert router.route(request(), loads(2, num_requests, 1), holding(3, 9, 0)) == chosen


@pytest.mark.parametrize(("length", "chosen"), [(2, 0), (1, 1)])
def test_prefix_aware_goes_by_load_where_the_prefix_is_a_small_part(
    length: int, chosen: int
) -> None:
    router = PrefixAware(min_prefix_percent=20)
    assert router.route(request(), loads(1, 0), holding(length, 0)) == chosen


def test_a_prompt_without_a_full_block_goes_by_load() -> None:
    short = RoutingRequest(0, (), 5)
    for router in (PrefixAware(), LeastWork()):
        assert router.route(short, loads(2, 0, 1), lambda hashes: (0, 0, 0)) == 1


def test_least_work_weighs_missing_tokens_against_those_that_wait() -> None:
    """Replica 0 has all ten blocks. Another one is worth it once 161 tokens wait for replica 0."""
    router = LeastWork(request_tokens=0)
    for num_waiting, chosen in ((160, 0), (162, 1)):
        replicas = (ReplicaLoad(0, 3, num_waiting), ReplicaLoad(1, 3, 0))
        assert router.route(request(), replicas, holding(10, 0)) == chosen


def test_least_work_counts_each_request_as_tokens() -> None:
    """Six blocks, 96 tokens, are worth one request of 90 tokens and not one of 100."""
    for request_tokens, chosen in ((90, 0), (100, 1)):
        router = LeastWork(request_tokens)
        assert router.route(request(), loads(1, 0), holding(6, 0)) == chosen


def test_a_session_stays_on_its_replica_and_another_tenant_has_other_sessions() -> None:
    route = SessionSticky().route
    replicas = loads(*[0] * 8)

    def replica_of(tenant: str, session: str, number: int = 0) -> int:
        return route(request(number, tenant, session), replicas, holding(*[0] * 8))

    for session in map(str, range(20)):
        assert len({replica_of("a", session, number) for number in range(10)}) == 1
    found = [replica_of("a", str(session)) for session in range(400)]
    assert all(30 <= found.count(each.id) <= 80 for each in replicas)
    assert found != [replica_of("b", str(session)) for session in range(400)]


def test_a_replica_that_leaves_moves_its_sessions_only() -> None:
    route = SessionSticky().route
    replicas = loads(0, 0, 0, 0)
    remaining = replicas[:1] + replicas[2:]
    moved = 0
    for session in map(str, range(200)):
        turn = request(0, "a", session)
        before = route(turn, replicas, holding(0, 0, 0, 0))
        after = route(turn, remaining, holding(0, 0, 0))
        assert before in (1, after)
        moved += before == 1
    assert 25 <= moved <= 75


def test_a_session_leaves_a_replica_with_too_many_more_requests_until_it_has_fewer() -> None:
    router = SessionSticky(max_imbalance=2)
    turn = request(0, "a", "session")
    home = router.route(turn, loads(0, 0), holding(0, 0))
    for num_requests, expected in ((2, home), (3, 1 - home), (2, home)):
        counts = [0, 0]
        counts[home] = num_requests
        assert router.route(turn, loads(*counts), holding(0, 0)) == expected


def test_turns_of_a_session_stay_and_other_requests_follow_their_prefix() -> None:
    """Replica 2 holds the prompt. Each session has a replica of its own, whatever is held."""
    router, sticky, replicas = SessionOrPrefix(), SessionSticky(), loads(0, 0, 0)
    find_prefix = holding(0, 0, 9)
    assert router.route(request(), replicas, find_prefix) == 2
    sessions = [request(session_id=str(session)) for session in range(9)]
    found = [router.route(each, replicas, find_prefix) for each in sessions]
    assert found == [sticky.route(each, replicas, find_prefix) for each in sessions]
    assert set(found) == {0, 1, 2}


def test_without_a_session_the_fewest_requests_count() -> None:
    assert SessionSticky().route(request(), loads(2, 0, 1), holding(0, 0, 0)) == 1


@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_every_router_takes_one_of_the_replicas_and_the_same_one_again(router: Router) -> None:
    """Ids have gaps: a replica has left. Nothing is remembered between two decisions."""
    rng = Random(0)
    chosen = set()
    for number in range(300):
        ids = sorted(rng.sample(range(20), rng.randint(1, 6)))
        replicas = [ReplicaLoad(i, rng.randint(0, 40), rng.randint(0, 9000)) for i in ids]
        lengths = [rng.randint(0, 10) for _ in ids]
        session = rng.choice(("", "x", "y"))
        found = [
            router.route(request(number, "t", session), replicas, holding(*lengths))
            for _ in range(2)
        ]
        assert found[0] == found[1] and found[0] in ids
        chosen.add(found[0])
    assert len(chosen) == 20


def test_an_unknown_router_is_refused_with_the_names_that_exist() -> None:
    assert find_router("prefix-aware") == PrefixAware()
    with pytest.raises(InvalidConfig, match=r"'random' is not known.*round-robin"):
        find_router("random")
