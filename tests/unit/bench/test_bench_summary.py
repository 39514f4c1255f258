"""What a load's traces add up to, on traces made by hand."""

import pytest

from mmserve.bench.client import Trace
from mmserve.bench.load import Disturbed, Run
from mmserve.bench.serve import beside_row
from mmserve.bench.summary import Goal, medians, ratio, summary


def trace(*pieces, sent=0.0, error=None, **usage):
    return Trace(sent, list(pieces), ended=pieces[-1] if pieces else sent, usage=usage, error=error)


def test_latencies_are_milliseconds_and_rates_are_of_the_whole_run():
    one = trace(0.5, 0.6, 0.8, completion_tokens=3, prompt_tokens=10)
    other = trace(1.5, 1.6, sent=1.0, completion_tokens=2, prompt_tokens=20)
    row = summary(Run([one, other], wall=2.0), Goal())
    assert row["TTFT mean ms"] == pytest.approx(500)
    assert row["ITL p50 ms"] == pytest.approx(100)
    assert row["ITL max ms"] == pytest.approx(200)
    assert row["TPOT mean ms"] == pytest.approx((150 + 100) / 2)
    assert row["e2e max ms"] == pytest.approx(800)
    assert (row["output tok/s"], row["requests/s"]) == (2.5, 1.0)
    assert (row["prompt tokens"], row["cached tokens"], row["output tokens"]) == (30, None, 5)


def test_a_token_costs_the_same_however_tokens_are_packed_into_pieces():
    apart = trace(1.0, 2.0, 3.0, 4.0, 5.0, completion_tokens=5)
    packed = trace(1.0, 5.0, completion_tokens=5)
    assert apart.tpot == packed.tpot == 1.0
    assert trace(1.0, completion_tokens=1).tpot is None


def test_pieces_are_counted_where_a_server_tells_no_tokens():
    assert trace(1.0, 2.0, 3.0).tokens == 3
    told = trace(1.0, prompt_tokens_details={"cached_tokens": 16})
    assert (told.cached_tokens, trace(1.0).cached_tokens) == (16, None)


def test_failed_requests_count_as_errors_and_nowhere_else():
    good = trace(0.1, 0.2, completion_tokens=2)
    bad = [trace(error="HTTP 503"), trace(9.0, error="broken stream"), trace(error="HTTP 503")]
    row = summary(Run([good, *bad], wall=1.0), Goal())
    assert row["errors"] == {"HTTP 503": 2, "broken stream": 1}
    assert (row["requests"], row["requests/s"], row["output tokens"]) == (4, 1.0, 2)
    assert row["TTFT max ms"] == pytest.approx(100)


def test_a_run_in_which_all_failed_has_no_latencies():
    row = summary(Run([trace(error="timeout")], wall=1.0), Goal())
    assert row["TTFT p50 ms"] is row["ITL p99 ms"] is row["TPOT mean ms"] is None
    assert row["goodput/s"] == 0


@pytest.mark.parametrize(
    ("goal", "good"),
    [
        (Goal(), 3),
        (Goal(ttft_ms=150), 2),
        (Goal(itl_ms=150), 2),
        (Goal(ttft_ms=150, itl_ms=150), 1),
    ],
)
def test_goodput_counts_answers_within_every_goal(goal, good):
    quick, late, stuttering = trace(0.1, 0.2), trace(0.2, 0.3), trace(0.1, 0.5)
    failed = trace(0.1, error="broken stream")
    assert summary(Run([quick, late, stuttering, failed], wall=1.0), goal)["goodput/s"] == good


def test_medians_leave_out_what_was_not_told_and_add_errors_up():
    rounds = [
        {"a": 1.0, "errors": {"x": 1}},
        {"a": None, "errors": {}},
        {"a": 3.0, "errors": {"x": 1, "y": 1}},
    ]
    assert medians(rounds) == {"a": 2.0, "errors": {"x": 2, "y": 1}}
    assert medians([{"a": None}]) == {"a": None}


def test_ratios_compare_servers_within_a_round():
    """The second round was slow for both, which a ratio of medians would show as a difference."""
    first, other = [{"a": 1.0}, {"a": 10.0}, {"a": 1.2}], [{"a": 2.0}, {"a": 20.0}, {"a": 2.4}]
    assert ratio(other, first, "a") == pytest.approx(2.0)
    assert ratio([{"a": None}], [{"a": 1.0}], "a") is None


def test_a_disturbed_stream_is_compared_with_itself_alone():
    alone = trace(0.0, 0.01, 0.02, 0.03)
    pictures = Run([trace(0.2, 0.3)], wall=0.3)
    row = beside_row(Disturbed(alone, [0.01] * 98 + [0.05, 0.05], pictures, covered=True))
    assert row["ITL p50 alone ms"] == pytest.approx(10)
    assert row["p99 / alone"] == pytest.approx(5, rel=0.01)
    assert row["errors"] == {}
    short = beside_row(Disturbed(alone, [], pictures, covered=False))
    assert short["errors"] == {"stream too short": 1}
    assert short["p99 / alone"] is None
