"""FeedbackQueue: which jobs run and which wait, job by job."""

from __future__ import annotations

from forge.feedback_queue import Demotion, FeedbackQueue, QueueLevel

QUICK = QueueLevel(slots=2, cpu_s=0.05, memory_mib=8, max_waiting=0)
SLOW = QueueLevel(slots=1, cpu_s=2.0, memory_mib=16, max_waiting=3)


def create_lanes(jobs: str = "") -> FeedbackQueue[str]:
    made: FeedbackQueue[str] = FeedbackQueue([QUICK, SLOW])
    for job in jobs:
        made.add(job)
    return made


def test_jobs_begin_in_the_order_of_arrival_where_there_is_a_slot() -> None:
    made = create_lanes("abc")
    assert made.start_jobs() == [("a", QUICK), ("b", QUICK)]
    assert made.start_jobs() == []
    made.remove("b")
    assert made.start_jobs() == [("c", QUICK)]


def test_a_short_job_waits_for_no_more_than_one_turn_of_each_job_before_it() -> None:
    """Twelve jobs that never end, and one: it runs after each of them had 0.05 s, not 2 s."""
    made, turns = create_lanes("abcdefghijkl"), list[str]()
    made.add("z")
    for _ in range(20):
        quick = [job for job, level in made.start_jobs() if level is QUICK]
        turns += quick
        for job in quick:
            if job != "z":
                made.demote(job)
    assert turns.index("z") == 12 and len(turns) == len(set(turns))


def test_a_job_that_runs_out_of_time_starts_over_with_more() -> None:
    made = create_lanes("a")
    made.start_jobs()
    assert made.demote("a") is Demotion.DEMOTED
    assert made.start_jobs() == [("a", SLOW)]
    assert made.demote("a") is Demotion.LAST_LEVEL
    assert made.start_jobs() == []


def test_no_more_than_max_waiting_jobs_wait_for_the_next_level() -> None:
    made: FeedbackQueue[str] = FeedbackQueue([QUICK._replace(slots=5), SLOW])
    for job in "abcde":
        made.add(job)
    assert len(made.start_jobs()) == 5
    moved = [made.demote(job) for job in "abcde"]
    assert moved == [
        Demotion.DEMOTED,
        Demotion.DEMOTED,
        Demotion.DEMOTED,
        Demotion.LEVEL_FULL,
        Demotion.LEVEL_FULL,
    ]
    assert made.start_jobs() == [("a", SLOW)]


def test_the_slot_of_a_removed_job_is_free_wherever_it_was() -> None:
    made = create_lanes("abc")
    made.start_jobs()
    made.demote("a")
    assert made.start_jobs() == [("c", QUICK), ("a", SLOW)]
    for job in "abc":
        made.remove(job)
    made.add("d")
    assert made.start_jobs() == [("d", QUICK)]


def test_the_queue_contains_a_job_from_its_arrival_until_it_is_removed() -> None:
    made = create_lanes("a")
    assert made.contains("a")
    made.start_jobs()
    assert made.contains("a")
    made.demote("a")
    assert made.contains("a")
    made.remove("a")
    assert not made.contains("a")
