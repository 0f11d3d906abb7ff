"""Lanes: who runs and who waits, job by job."""

from __future__ import annotations

from forge.lanes import Lane, Lanes, Moved

QUICK = Lane(slots=2, cpu_s=0.05, memory_mib=8, max_waiting=0)
SLOW = Lane(slots=1, cpu_s=2.0, memory_mib=16, max_waiting=3)


def lanes(jobs: str = "") -> Lanes[str]:
    made: Lanes[str] = Lanes([QUICK, SLOW])
    for job in jobs:
        made.add(job)
    return made


def test_jobs_begin_in_the_order_of_arrival_where_there_is_a_slot() -> None:
    made = lanes("abc")
    assert made.due() == [("a", QUICK), ("b", QUICK)]
    assert made.due() == []
    made.remove("b")
    assert made.due() == [("c", QUICK)]


def test_a_short_job_waits_for_no_more_than_one_turn_of_each_job_before_it() -> None:
    """Twelve that never end, and one: it runs after each of them has had 0.05 s, not 2 s."""
    made, turns = lanes("abcdefghijkl"), list[str]()
    made.add("z")
    for _ in range(20):
        quick = [job for job, lane in made.due() if lane is QUICK]
        turns += quick
        for job in quick:
            if job != "z":
                made.ran_out(job)
    assert turns.index("z") == 12 and len(turns) == len(set(turns))


def test_one_that_runs_out_of_time_begins_again_with_more() -> None:
    made = lanes("a")
    made.due()
    assert made.ran_out("a") is Moved.ON
    assert made.due() == [("a", SLOW)]
    assert made.ran_out("a") is Moved.NO_LANE
    assert made.due() == []


def test_no_more_wait_for_the_next_lane_than_may() -> None:
    made: Lanes[str] = Lanes([QUICK._replace(slots=5), SLOW])
    for job in "abcde":
        made.add(job)
    assert len(made.due()) == 5
    moved = [made.ran_out(job) for job in "abcde"]
    assert moved == [Moved.ON, Moved.ON, Moved.ON, Moved.NO_ROOM, Moved.NO_ROOM]
    assert made.due() == [("a", SLOW)]


def test_a_place_of_one_that_is_removed_is_free_wherever_it_was() -> None:
    made = lanes("abc")
    made.due()
    made.ran_out("a")
    assert made.due() == [("c", QUICK), ("a", SLOW)]
    for job in "abc":
        made.remove(job)
    made.add("d")
    assert made.due() == [("d", QUICK)]


def test_a_lane_has_a_job_from_its_arrival_until_it_is_removed() -> None:
    made = lanes("a")
    assert made.has("a")
    made.due()
    assert made.has("a")
    made.ran_out("a")
    assert made.has("a")
    made.remove("a")
    assert not made.has("a")
