"""ResponseStore: responses are kept for a time and within bytes, the oldest are dropped first."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from forge.server.responses_api.store import ENTRY_BYTES, ResponseStore, StoredResponse


def stored(size: int, now_s: float = 0.0) -> StoredResponse:
    return StoredResponse(b"x" * size, b"", b"", "completed", now_s)


def test_the_oldest_responses_make_room_for_a_new_one() -> None:
    store = ResponseStore(3 * (ENTRY_BYTES + 100), ttl_s=60.0)
    for name in "abcd":
        store.put(name, stored(100), 0.0)
    assert [store.get(name, 0.0) is not None for name in "abcd"] == [False, True, True, True]
    store.put("e", stored(200 + ENTRY_BYTES), 0.0)
    assert [store.get(name, 0.0) is not None for name in "bcde"] == [False, False, True, True]


def test_a_response_larger_than_the_store_is_not_stored_and_drops_no_other() -> None:
    store = ResponseStore(ENTRY_BYTES + 100, ttl_s=60.0)
    store.put("a", stored(100), 0.0)
    store.put("b", stored(101), 0.0)
    assert store.get("a", 0.0) is not None and store.get("b", 0.0) is None
    store.put("a", stored(101), 0.0)  # the larger form of one that was stored replaces nothing
    assert store.get("a", 0.0) is None and store.num_bytes == 0


def test_a_response_is_dropped_after_its_time_and_a_later_form_starts_it_again() -> None:
    store = ResponseStore(10**6, ttl_s=60.0)
    store.put("a", stored(1, 0.0), 0.0)
    store.put("b", stored(1, 30.0), 30.0)
    store.put("a", stored(2, 40.0), 40.0)
    assert store.get("b", 89.9) is not None
    assert store.get("b", 90.0) is None and not store.delete("b", 90.0)
    assert store.get("a", 99.9) is not None and store.get("a", 100.0) is None
    assert (len(store), store.num_bytes) == (0, 0)


@given(st.lists(st.tuples(st.sampled_from("pgd"), st.integers(0, 5), st.integers(0, 3))))
def test_the_bytes_are_those_of_the_responses_and_never_too_many(
    steps: list[tuple[str, int, int]],
) -> None:
    """A record of what was put last, oldest first, predicts what is found."""
    max_bytes, record, now_s = 4 * ENTRY_BYTES, dict[int, tuple[int, float]](), 0.0
    store = ResponseStore(max_bytes, ttl_s=5.0)
    for action, key, size in steps:
        now_s += size
        record = {each: put for each, put in record.items() if now_s - put[1] < 5.0}
        match action:
            case "p":
                num_bytes = (size + 1) * ENTRY_BYTES
                store.put(str(key), stored(size * ENTRY_BYTES, now_s), now_s)
                record.pop(key, None)
                while sum(each for each, _ in record.values()) + num_bytes > max_bytes:
                    record.pop(next(iter(record)))
                record[key] = (num_bytes, now_s)
            case "g":
                assert (store.get(str(key), now_s) is not None) == (key in record)
            case _:
                assert store.delete(str(key), now_s) == (record.pop(key, None) is not None)
        found = {each for each in range(6) if store.get(str(each), now_s) is not None}
        assert found == set(record)
        assert store.num_bytes == sum(each for each, _ in record.values()) <= max_bytes
