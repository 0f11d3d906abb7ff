"""RoutingState: each open request counts on one replica, whatever happens to it."""

from __future__ import annotations

from random import Random

import pytest

from forge.ray.routing_key import RoutingKey
from forge.ray.routing_state import RoutingState, replica_id_of
from forge.routing.router import LeastLoaded, PrefixAware, SessionOrPrefix

NAMES = ["a", "b", "c", "d"]


def state(router: object = None) -> RoutingState:
    made = RoutingState(router or PrefixAware(), max_blocks=100)  # type: ignore[arg-type]
    made.set_replicas(NAMES)
    return made


def key(prefix: int, length: int = 4, session_id: str = "") -> RoutingKey:
    hashes = tuple(bytes([prefix, i]) for i in range(length))
    return RoutingKey(hashes, 64 * length, "", session_id)


def num_requests(routing: RoutingState) -> dict[str, int]:
    return {
        name: routing.table.load(replica_id_of(name)).num_requests
        for name in NAMES
        if replica_id_of(name) in routing.table.active_ids
    }


def test_requests_with_one_prefix_go_to_one_replica_and_others_elsewhere() -> None:
    routing = state()
    first = [routing.choose(f"r{i}", key(1), NAMES) for i in range(4)]
    assert len(set(first)) == 1
    assert routing.choose("other", key(2), NAMES) != first[0]


def test_a_request_that_ray_sent_elsewhere_counts_there() -> None:
    routing = state()
    chosen = routing.choose("r", key(1), NAMES)
    other = next(each for each in NAMES if each != chosen)
    routing.settle("r", key(1), other)
    assert num_requests(routing) == {name: int(name == other) for name in NAMES}
    routing.settle("r", key(1), other)
    assert sum(num_requests(routing).values()) == 1


def test_a_request_that_is_chosen_again_counts_once() -> None:
    routing = state()
    for _ in range(3):
        routing.choose("r", key(1), NAMES)
    assert sum(num_requests(routing).values()) == 1
    routing.end("r")
    routing.end("r")
    assert sum(num_requests(routing).values()) == 0


def test_a_replica_that_lost_the_request_is_chosen_only_where_there_is_no_other() -> None:
    routing = state()
    chosen = routing.choose("r", key(1), NAMES)
    assert chosen is not None
    routing.end("r")
    assert routing.choose("r", key(1), NAMES, tried=[chosen]) != chosen
    assert routing.choose("r", key(1), [chosen], tried=[chosen]) == chosen


def test_requests_of_a_replica_that_is_gone_are_forgotten_with_it() -> None:
    routing = state(LeastLoaded())
    for i in range(8):
        routing.choose(f"r{i}", key(i), NAMES)
    assert num_requests(routing) == dict.fromkeys(NAMES, 2)
    routing.remove_replica("a")
    routing.remove_replica("a")
    routing.set_replicas(["b", "c", "d"])
    for i in range(8):
        routing.end(f"r{i}")
    assert num_requests(routing) == {"b": 0, "c": 0, "d": 0}


def test_where_no_candidate_is_known_nothing_is_chosen() -> None:
    routing = state()
    assert routing.choose("r", key(1), ["unknown"]) is None
    routing.set_replicas([])
    assert routing.choose("r", key(1), NAMES) is None


def test_turns_of_a_session_stay_on_their_replica_when_another_one_leaves() -> None:
    routing = state(SessionOrPrefix())
    before = {
        session: routing.choose(f"r{session}", key(session, session_id=f"s{session}"), NAMES)
        for session in range(20)
    }
    for session in range(20):
        routing.end(f"r{session}")
    routing.set_replicas(["b", "c", "d"])
    for session, name in before.items():
        again = routing.choose("r", key(99, session_id=f"s{session}"), ["b", "c", "d"])
        assert again == name or name == "a"
        routing.end("r")
    assert len(set(before.values())) == 4


@pytest.mark.parametrize("seed", range(5))
def test_after_any_order_of_calls_each_open_request_counts_once(seed: int) -> None:
    rng = Random(seed)
    routing = state(SessionOrPrefix())
    alive, where = list(NAMES), dict[str, str]()
    num_lost = 0
    for step in range(2000):
        match rng.randrange(6):
            case 0 | 1 | 2:
                request = f"r{rng.randrange(40)}"
                chosen = routing.choose(request, key(rng.randrange(9)), alive)
                assert chosen in alive
                where[request] = chosen
            case 3:
                request, name = f"r{rng.randrange(40)}", rng.choice(alive)
                routing.settle(request, key(rng.randrange(9)), name)
                where[request] = name
            case 4:
                request = f"r{rng.randrange(40)}"
                routing.end(request)
                where.pop(request, None)
            case _ if step % 20 == 0:
                alive = rng.sample(NAMES, rng.randint(1, 4))
                routing.set_replicas(alive)
                num_before = len(where)
                where = {request: name for request, name in where.items() if name in alive}
                num_lost += num_before - len(where)
        counts = {name: list(where.values()).count(name) for name in alive}
        assert num_requests(routing) == counts
    assert num_lost > 0
