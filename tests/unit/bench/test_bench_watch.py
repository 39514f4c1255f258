"""What a soak makes of a server's figures and of its memory."""

from mmserve.bench.soak_watch import Memory, busy, figures, never

PAGE = """# HELP mmserve_kv_pages Pages of the KV pool
mmserve_kv_pages 9.0
mmserve_kv_pages_free 4.0
mmserve_kv_pages_cached 5.0
mmserve_requests_running 0.0
mmserve_cache_hits_total{cache="pixels"} 3.0
mmserve_workers_lost_total 1.0
mmserve_requests_total{outcome="stop"} 7.0
"""


def test_pages_that_are_cached_are_at_rest_and_others_are_not():
    now = figures(PAGE)
    assert now['mmserve_cache_hits_total{cache="pixels"}'] == 3
    assert busy(now) == {}
    assert busy({**now, "mmserve_kv_pages_cached": 3.0}) == {"pages in use": 2}
    assert busy({**now, "mmserve_requests_waiting": 1.0}) == {"requests_waiting": 1}
    assert busy({}) != {}, "a server that is gone tells nothing"


def test_losses_and_restarts_count_from_the_beginning_of_the_soak():
    before = figures(PAGE)
    assert never(before, before) == {}
    restarted = {
        **before,
        "mmserve_engine_restarts_total": 1.0,
        'mmserve_requests_total{outcome="stop"}': 99.0,
    }
    assert never(before, restarted) == {"mmserve_engine_restarts_total": 1}
    assert never({}, before) == {"mmserve_workers_lost_total": 1}


def memory(sizes):
    found = Memory(pid=1, titles={1: "server", 2: "worker", 3: "late"})
    found.samples = sizes
    return {line["process"]: line for line in found.table()}


def test_a_process_that_grows_all_the_time_is_not_flat():
    lines = memory([{1: 100.0 + n, 2: 50.0} for n in range(60)])
    assert not lines["server"]["flat"]
    assert lines["worker"]["flat"]
    assert lines["server"]["growth MiB"] == 36


def test_filling_caches_in_the_first_tenth_is_no_growth():
    lines = memory([{1: min(100.0 + 20 * n, 200.0)} for n in range(60)])
    assert lines["server"]["flat"]
    assert lines["server"]["growth MiB"] == 0


def test_who_was_not_there_all_the_time_is_not_compared():
    assert memory([{1: 1.0, 2: 1.0}] * 10 + [{1: 1.0, 3: 1.0}] * 20).keys() == {"server"}
    assert memory([{1: 1.0}]) == {}
