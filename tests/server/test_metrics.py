"""/metrics: its values are what happened, under every name, in a thread and in a process.

Values are compared with the requests that were sent, and parsed as Prometheus parses them.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import prometheus_client
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import HistogramMetricFamily
from prometheus_client.openmetrics import parser as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from starlette.applications import Starlette

from forge.async_llm import AsyncLLM
from forge.errors import InvalidConfig
from forge.models.hash import HashModel
from forge.models.paged import FaultHooks
from forge.outputs import TextDelta
from forge.request import Request, SamplingParams
from forge.seam import StepPlan
from forge.server.app import create_app
from forge.server.metrics import METRICS
from forge.server.server_stats import HTTP_STATUSES, TIME_BUCKETS_S, Histogram, ServerStats
from tests.core.builders import hash_model, next_plan, request, scheduler
from tests.server.local_server import GatedModel, wait_until
from tests.server.test_server import fail_at_position, open_server, without_cached

ROOT = Path(__file__).resolve().parents[2]
SMALL = {"num_blocks": 64, "block_size": 4, "max_model_len": 256}
ENDLESS = {"ignore_eos": True, "temperature": 0}
LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)

Values = dict[str, float]


def parse_samples(text: str) -> Values:
    """Return each sample by its name and labels, as `name{label="value"}`."""
    found: Values = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            labels = ",".join(f'{name}="{value}"' for name, value in sorted(sample.labels.items()))
            key = f"{sample.name}{{{labels}}}" if labels else sample.name
            assert key not in found, key
            found[key] = sample.value
    return found


class MeteredApp(NamedTuple):
    """An application that is called without a socket."""

    app: Starlette
    llm: AsyncLLM

    def send_all(self, *calls: tuple[str, str, dict[str, Any] | None]) -> list[httpx.Response]:
        """Return the responses of simultaneous calls."""

        async def all_of_them() -> list[httpx.Response]:
            transport = httpx.ASGITransport(self.app)
            async with httpx.AsyncClient(
                transport=transport, base_url="http://127.0.0.1"
            ) as client:
                made = [client.request(method, path, json=body) for method, path, body in calls]
                return await asyncio.wait_for(asyncio.gather(*made), 60)

        return asyncio.run(all_of_them())

    def generate(self, *bodies: dict[str, Any]) -> list[dict[str, Any]]:
        """Return the responses of /generate to simultaneous requests."""
        answers = self.send_all(*(("POST", "/generate", body) for body in bodies))
        assert [answer.status_code for answer in answers] == [200] * len(bodies)
        return [answer.json() for answer in answers]

    def scrape(self) -> Values:
        (answer,) = self.send_all(("GET", "/metrics", None))
        assert answer.status_code == 200
        return parse_samples(answer.text)


@contextmanager
def open_metered(
    name: str = "hash",
    *,
    kind: Callable[..., AsyncLLM] = AsyncLLM,
    compat: str | None = None,
    prepare: Callable[[AsyncLLM], None] = lambda llm: None,
    **options: Any,
) -> Iterator[MeteredApp]:
    """Open an application on a new engine."""
    llm = kind(name, **{**SMALL, **options})
    try:
        prepare(llm)
        yield MeteredApp(create_app(llm, served_model_name="m", metrics_compat=compat), llm)
    finally:
        llm.close()


def difference(after: Values, before: Values) -> Values:
    """Return the values that have changed, as differences."""
    return {key: value - before[key] for key, value in after.items() if value != before[key]}


# Counts.


@pytest.mark.parametrize("kind", [AsyncLLM, AsyncLLM.spawn], ids=["thread", "process"])
def test_figures_match_the_requests(kind: Callable[..., AsyncLLM]) -> None:
    """Nine tokens fill two blocks of four: the second time, eight of them are cached."""
    body = {"prompt": "nine toks", "max_tokens": 6, **ENDLESS}
    with open_metered(kind=kind) as served:
        nothing = served.scrape()
        served.generate(body)
        served.generate(body)
        found = served.scrape()
    assert {key for key, value in nothing.items() if value} == {"forge_kv_blocks_total"}
    assert found["forge_kv_blocks_total"] == 64
    assert found["forge_kv_blocks_used"] == found["forge_kv_usage_ratio"] == 0
    assert found["forge_requests_running"] == found["forge_requests_waiting"] == 0
    assert found["forge_kv_blocks_cached"] == 3, "14 of 15 tokens are computed: three full blocks"
    assert found["forge_prefix_cache_queries_total"] == 18
    assert found["forge_prefix_cache_hits_total"] == 8
    assert found["forge_prompt_tokens_total"] == 18
    assert found["forge_generation_tokens_total"] == 12
    assert found['forge_requests_total{finish="length"}'] == 2
    assert found['forge_preemptions_total{mode="recompute"}'] == 0
    assert found["forge_step_time_seconds_count"] == found["forge_step_tokens_count"] == 12
    assert found["forge_step_tokens_sum"] == (9 + 5) + (1 + 5)
    for name in ("time_to_first_token", "request_latency", "queue_time"):
        assert found[f"forge_{name}_seconds_count"] == 2, name


def test_each_ending_has_its_own_count() -> None:
    with open_metered(prepare=fail_at_position(230, step_s=0.02)) as served:
        served.generate({"prompt": "ends", "max_tokens": 3, **ENDLESS})
        text = served.generate({"prompt": "stop", "max_tokens": 5, **ENDLESS})[0]["text"]
        served.generate({"prompt": "stop", "max_tokens": 5, "stop": text[2], **ENDLESS})
        (failed,) = served.send_all(("POST", "/generate", {"prompt": "x" * 232, "max_tokens": 9}))
        assert failed.status_code == 500

        async def leave() -> None:
            async with aclosing(served.llm.stream("leaves", LONG)) as stream:
                await anext(stream)

        asyncio.run(leave())
        found = served.scrape()
    counts = {key: value for key, value in found.items() if key.startswith("forge_requests_total")}
    assert list(counts.values()) == [1, 2, 1, 1]
    assert re.findall(r'"(\w+)"', " ".join(counts)) == ["stop", "length", "abort", "error"]
    assert found["forge_request_latency_seconds_count"] == 3, "only those served to their end"


def test_answers_are_counted_by_their_status() -> None:
    with open_metered() as served:
        served.generate({"prompt": "good", "max_tokens": 1})
        served.send_all(
            ("POST", "/generate", {"prompt": "bad", "max_tokens": -1}),
            ("POST", "/generate", {"prompt": "bad", "foo": 1}),
            ("POST", "/nowhere", {}),
        )
        found = served.scrape()
    counts = {key: value for key, value in found.items() if key.startswith("forge_http_responses")}
    assert len(counts) == len(HTTP_STATUSES)
    assert {re.findall(r"\d+", key)[0]: value for key, value in counts.items() if value} == {
        "200": 1,
        "400": 2,
        "404": 1,
    }


def test_choices_end_one_by_one_and_share_a_prompt() -> None:
    with open_metered() as served:
        body = {"model": "m", "prompt": "shared", "n": 3, "max_tokens": 4, "ignore_eos": True}
        (answer,) = served.send_all(("POST", "/v1/completions", body))
        found = served.scrape()
    assert without_cached(answer.json()["usage"]) == {
        "prompt_tokens": found["forge_prompt_tokens_total"],
        "completion_tokens": found["forge_generation_tokens_total"],
        "total_tokens": 6 + 12,
    }
    assert found['forge_requests_total{finish="length"}'] == 3
    assert found["forge_time_to_first_token_seconds_count"] == 1
    assert found["forge_queue_time_seconds_count"] == 1
    assert found["forge_request_latency_seconds_count"] == 3


def test_preemptions_are_counted_where_the_cache_is_small() -> None:
    """Eight blocks. Each of two requests grows to six; the first step waits for both."""

    def together(llm: AsyncLLM) -> None:
        def both(plan: StepPlan) -> None:
            if plan.step == 0:
                wait_until(lambda: len(llm._mailboxes) == 2)

        sizes = {"num_blocks": 8, "block_size": llm.engine.config.block_size}
        llm.engine.model = HashModel(**sizes, faults=FaultHooks(both))

    with open_metered(num_blocks=8, prepare=together) as served:
        served.generate(*({"prompt": f"req{i}", "max_tokens": 20, **ENDLESS} for i in range(2)))
        found = served.scrape()
        scheduler = served.llm.engine.scheduler
        counted, recomputed = scheduler.num_preemptions, scheduler.num_recomputed_tokens
    assert found['forge_preemptions_total{mode="recompute"}'] == counted >= 1
    assert found["forge_recomputed_tokens_total"] == recomputed >= 1
    assert found["forge_queue_time_seconds_count"] == 2, "a preempted request counted twice"
    assert found["forge_prefix_cache_queries_total"] == 8, "a preempted request counted twice"
    assert found["forge_prefix_cache_hits_total"] == 0, "and they share nothing"
    assert found["forge_generation_tokens_total"] == 40


def test_gauges_count_the_requests_that_run_and_wait_now() -> None:
    with open_metered("hash:step_ms=100", max_num_seqs=1, max_num_batched_tokens=64) as served:

        async def scrape_amid() -> Values:
            async with (
                aclosing(served.llm.stream("one", LONG)) as one,
                aclosing(served.llm.stream("two", LONG)) as two,
            ):
                second = asyncio.create_task(anext(two))
                await anext(one)
                while not served.llm.status.num_waiting:
                    await asyncio.sleep(0.002)
                found = await asyncio.to_thread(served.scrape)
                second.cancel()
                await asyncio.gather(second, return_exceptions=True)
                return found

        found = asyncio.run(asyncio.wait_for(scrape_amid(), 60))
    assert (found["forge_requests_running"], found["forge_requests_waiting"]) == (1, 1)
    assert found["forge_kv_blocks_used"] >= 1
    assert found["forge_kv_usage_ratio"] == found["forge_kv_blocks_used"] / 64


def test_times_are_those_of_the_steps() -> None:
    """Steps of 20 ms, one request at a time: the second waits for all five of the first."""
    step_s, slack_s = 0.02, 0.001
    with open_metered("hash:step_ms=20", max_num_seqs=1, max_num_batched_tokens=64) as served:
        served.generate(*({"prompt": f"req{i}", "max_tokens": 5, **ENDLESS} for i in range(2)))
        found = served.scrape()
    assert found["forge_step_time_seconds_sum"] >= 10 * step_s - slack_s
    assert found["forge_step_time_seconds_count"] == 10
    waited_s, first_s, between_s, latency_s = (
        found[f"forge_{name}_seconds_sum"]
        for name in ("queue_time", "time_to_first_token", "inter_token_latency", "request_latency")
    )
    assert 5 * step_s - slack_s <= waited_s < latency_s - 2 * 4 * step_s
    assert first_s >= (1 + 6) * step_s - slack_s
    num_between = found["forge_inter_token_latency_seconds_count"]
    assert num_between <= 8
    assert between_s == pytest.approx(latency_s - first_s)
    assert between_s >= 4 * step_s or num_between < 8, "unless it was read late, and so together"
    assert latency_s >= (5 + 10) * step_s - slack_s


def test_an_event_of_several_tokens_is_one_delay() -> None:
    with open_metered() as served:
        figures = ServerStats(served.llm)
        one = figures.on_request(Request(0, (1, 2, 3), SamplingParams(n=2)))
        one.on_deltas([TextDelta(0, "", ())])
        one.on_deltas([TextDelta(0, "ab", (5, 6)), TextDelta(1, "a", (5,))])
        one.on_deltas([TextDelta(0, "cd", (7, 8), "length")])
        one.on_close()
        one.on_close()
    assert (figures.num_prompt_tokens, figures.num_generation_tokens) == (3, 5)
    assert figures.num_finished == {"stop": 0, "length": 1, "abort": 1, "error": 0}
    counted = [
        h.buckets()[0][-1][1] for h in (figures.time_to_first_token, figures.inter_token_latency)
    ]
    assert counted == [1, 1]


def test_a_prompt_that_is_only_scored_is_counted_and_has_no_first_token() -> None:
    with open_metered() as served:
        body = {"model": "m", "prompt": "scored", "max_tokens": 0, "echo": True}
        served.send_all(("POST", "/v1/completions", body))
        found = served.scrape()
    assert found["forge_prompt_tokens_total"] == 6
    assert found["forge_generation_tokens_total"] == 0
    assert found["forge_time_to_first_token_seconds_count"] == 0
    assert found['forge_requests_total{finish="length"}'] == 1


def test_the_planner_counts_what_its_plans_admit_and_compute() -> None:
    """Six blocks of four for three requests that grow to five, four and five."""
    s = scheduler(blocks=6, block_size=4, max_num_batched_tokens=8)
    for id, length in ((0, 11), (1, 5), (2, 9)):
        s.add(request(id, range(1, length + 1), max_tokens=9, ignore_eos=True))
    m = hash_model(s)
    started_ids: list[int] = []
    admitted = queried = computed = preempted = recomputed = 0
    positions = set[tuple[int, int]]()
    while s.has_work:
        plan = next_plan(s)
        started_ids += s.new_request_ids
        preempted += len(plan.preempted)
        computed += sum(row.end - row.start for row in plan.rows)
        for row in plan.rows:
            of_row = {(row.seq_id, position) for position in range(row.start, row.end)}
            recomputed += len(positions & of_row)
            positions |= of_row
        first = [event.seq_id for event in plan.admitted if event.why.startswith("new")]
        admitted += len(plan.admitted)
        queried += sum(len(s.running[seq_id].tokens) for seq_id in first)
        s.commit(plan, m.forward(plan).result())
    assert admitted > 3, "no request was admitted twice"
    assert started_ids == [0, 1, 2]
    assert (s.num_preemptions, s.num_planned_tokens, s.num_queried_tokens) == (
        preempted,
        computed,
        queried,
    )
    assert s.num_recomputed_tokens == recomputed > 0


def test_what_computes_nothing_is_no_step() -> None:
    with open_metered() as served:
        served.generate({"prompt": "a", "max_tokens": 3, **ENDLESS})
        served.send_all(("POST", "/reset_prefix_cache", None))
        found = served.scrape()
    assert found["forge_step_time_seconds_count"] == found["forge_step_tokens_count"] == 3


# Invariants.


def test_no_count_ever_falls() -> None:
    with open_metered(num_blocks=8, max_model_len=32) as served:
        before = served.scrape()
        for round in range(3):
            bodies = ({"prompt": f"{round}{i}", "max_tokens": 20, **ENDLESS} for i in range(3))
            served.generate(*bodies)
            served.send_all(("POST", "/reset_prefix_cache", None))
            after = served.scrape()
            counts = {key: after[key] - before[key] for key in after if not is_gauge(key)}
            assert min(counts.values()) >= 0 and max(counts.values()) > 0
            before = after
        served.llm.close()
        after = served.scrape()
        scraped = {'forge_http_responses_total{status="200"}': 1}
        assert difference(after, before) == scraped, "an engine that has ended takes nothing back"


def is_gauge(key: str) -> bool:
    return re.match(r"forge_(requests_(running|waiting)|kv_)", key) is not None


def test_two_applications_share_nothing() -> None:
    with open_metered() as one, open_metered() as other:
        one.generate({"prompt": "mine", "max_tokens": 2, **ENDLESS})
        assert one.scrape()["forge_prompt_tokens_total"] == 4
        assert other.scrape()["forge_prompt_tokens_total"] == 0


# Formats.


@given(st.lists(st.floats(0.0, 1000.0) | st.sampled_from(TIME_BUCKETS_S)))
def test_a_histogram_is_that_of_the_library(values: list[float]) -> None:
    mine = Histogram(TIME_BUCKETS_S)
    theirs = prometheus_client.Histogram("h", "h", buckets=TIME_BUCKETS_S, registry=None)
    for value in values:
        mine.observe(value)
        theirs.observe(value)
    (family,) = theirs.collect()
    buckets = [(s.labels["le"], s.value) for s in family.samples if s.name == "h_bucket"]
    sums = [s.value for s in family.samples if s.name == "h_sum"]
    assert mine.buckets() == (buckets, *sums)


def test_head_has_the_headers_of_get_without_the_body() -> None:
    with open_server() as server:
        whole, head = server.client.get("/metrics"), server.client.head("/metrics")
    assert head.status_code == 200 and head.content == b""
    assert head.headers["content-type"] == whole.headers["content-type"]
    assert whole.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    assert parse_samples(whole.text)["forge_kv_blocks_total"] == 64


def test_the_newer_format_is_sent_where_the_accept_header_has_it() -> None:
    accept = {"accept": "application/openmetrics-text; version=1.0.0"}
    with open_server() as server:
        answer = server.client.get("/metrics", headers=accept)
    assert answer.headers["content-type"].startswith("application/openmetrics-text; version=1.0.0")
    families = list(openmetrics.text_string_to_metric_families(answer.text))
    assert len(families) == len(METRICS)


def test_names_of_vllm_are_there_only_where_enabled_with_the_same_values() -> None:
    with open_metered(compat="vllm") as served:
        served.generate({"prompt": "both names", "max_tokens": 5, **ENDLESS})
        found = served.scrape()
    theirs = 'engine="0",model_name="m"'
    pairs = {
        "requests_running": "num_requests_running",
        "requests_waiting": "num_requests_waiting",
        "kv_usage_ratio": "kv_cache_usage_perc",
        "prefix_cache_queries_total": "prefix_cache_queries_total",
        "prefix_cache_hits_total": "prefix_cache_hits_total",
        "host_cache_queries_total": "external_prefix_cache_queries_total",
        "host_cache_hits_total": "external_prefix_cache_hits_total",
        'preemptions_total{mode="recompute"}': "num_preemptions_total",
        "prompt_tokens_total": "prompt_tokens_total",
        "generation_tokens_total": "generation_tokens_total",
        "time_to_first_token_seconds_sum": "time_to_first_token_seconds_sum",
        "inter_token_latency_seconds_count": "inter_token_latency_seconds_count",
        "request_latency_seconds_sum": "e2e_request_latency_seconds_sum",
        "queue_time_seconds_sum": "request_queue_time_seconds_sum",
        "step_tokens_sum": "iteration_tokens_total_sum",
    }
    for mine, name in pairs.items():
        assert found[f"forge_{mine}"] == found[f"vllm:{name}{{{theirs}}}"], mine
    assert found["vllm:prompt_tokens_total" + f"{{{theirs}}}"] == 10
    ended = 'vllm:request_success_total{engine="0",finished_reason="length",model_name="m"}'
    assert found[ended] == 1
    with open_metered() as served:
        assert not [key for key in served.scrape() if "vllm" in key]


def test_names_of_a_system_that_is_not_known_are_refused() -> None:
    with pytest.raises(InvalidConfig, match=r"^metrics_compat: 'tgi' is not known. Use vllm$"):
        with open_metered(compat="tgi"):
            pass


def metric_names() -> set[str]:
    """Return the names of all families, as a query may spell them."""
    names = {f"forge_{figure.forge_name.name}" for figure in METRICS}
    histograms = [
        each.forge_name.name for each in METRICS if each.family_type is HistogramMetricFamily
    ]
    parts = ("_bucket", "_sum", "_count")
    return names | {f"forge_{name}{part}" for name in histograms for part in parts}


def test_the_page_lists_every_name_and_no_other() -> None:
    page = (ROOT / "docs" / "Server.md").read_text(encoding="utf-8")
    listed = re.findall(r"^\| `(forge_\w+)", page, re.MULTILINE)
    assert listed == [f"forge_{figure.forge_name.name}" for figure in METRICS]
    theirs = re.findall(r"`vllm:(\w+)`", page)
    assert theirs == [name.name for figure in METRICS for name in figure.vllm_names]


def test_the_dashboard_queries_names_that_exist() -> None:
    text = (ROOT / "docs" / "grafana.json").read_text(encoding="utf-8")
    panels = json.loads(text)["panels"]
    used_names = {
        name
        for panel in panels
        for target in panel.get("targets", ())
        for name in re.findall(r"\b\w+:\w+|\bforge_\w+", target["expr"])
    }
    assert used_names and used_names <= metric_names()
    unseen = {f"forge_{figure.forge_name.name}" for figure in METRICS} - {
        re.sub(r"_(bucket|sum|count)$", "", name) for name in used_names
    }
    assert unseen == set(), "a figure that no panel shows"


def test_a_scrape_is_answered_while_a_step_runs() -> None:
    model = GatedModel(num_blocks=64, block_size=4)

    def prepare(llm: AsyncLLM) -> None:
        llm.engine.model = model

    with (
        open_server(prepare=prepare) as server,
        ThreadPoolExecutor(1) as pool,
        model.open_at_exit(),
    ):
        future = pool.submit(httpx.post, f"{server.url}/generate", json={"prompt": "a"}, timeout=60)
        wait_until(lambda: server.llm.stalled_s > 0.05)
        assert server.client.get("/metrics").status_code == 200
        assert not future.done()
