"""The engine on the device: recorded, overlapping and disturbed, it says what it says without all that."""

import random

import pytest
import torch
from helpers.engine_requests import drain
from helpers.equal_models import answered, assert_at_rest, renamed, said
from helpers.gpu_model import OnDevice, assert_alike, on_cuda

pytestmark = pytest.mark.gpu
BACKENDS = ("auto", "triton", "torch", "reference")


@pytest.fixture(params=BACKENDS)
def backend(request, device):
    if request.param == "triton" and not on_cuda(device):
        pytest.skip("interpreted it takes minutes")
    return {"attention_backend": request.param}


def test_answers_are_those_of_the_cpu(cuda, alone):
    on_cpu = OnDevice("cpu")
    assert_alike(alone, on_cpu.answers(on_cpu.requests))


def test_graphs_and_overlap_change_nothing(tiny, alone, backend):
    for overlap in ("off", "on"):
        for eager in (True, False):
            found = tiny.answers(tiny.requests, overlap=overlap, enforce_eager=eager, **backend)
            assert_alike(found, alone)


def test_graphs_are_captured_and_told(cuda, tiny):
    engine = tiny.engine()
    answered(engine, tiny.requests)
    costs = engine.runner.device.graph_costs()
    assert costs.graphs > 0
    assert costs.seconds > 0


def test_draws_go_by_seed_and_place_alone(tiny):
    requests = [
        renamed(r, f"{r.request_id}-{seed}", temperature=0.9, top_p=0.95, top_k=40, min_p=0.02, seed=seed)
        for r in tiny.requests
        for seed in (1, 2)
    ]
    plain = tiny.answers(requests, overlap="off", enforce_eager=True)
    assert [a.tokens for a in plain[::2]] != [a.tokens for a in plain[1::2]]
    assert_alike(tiny.answers(requests, overlap="on"), plain)


def test_pictures_that_arrive_beside_answers_disturb_nobody(tiny, alone):
    """The encoder has a stream of its own: every answer is right whenever its picture came."""
    rng = random.Random(0)
    for _ in range(20 if on_cuda(tiny.model.device) else 1):
        engine = tiny.engine(overlap="on", prefix_caching=False, encoder_cache_mib=1)
        waiting, outputs = list(enumerate(tiny.requests)), {}
        rng.shuffle(waiting)
        while waiting or engine.has_work:
            if waiting and rng.random() < 0.4:
                engine.submit(waiting.pop()[1])
            for output in engine.step():
                outputs.setdefault(output.request_id, []).append(output)
        assert_at_rest(engine)
        assert_alike([said(outputs[r.request_id]) for r in tiny.requests], alone)


def test_a_storm_of_aborts_leaves_nothing_and_hurts_nobody(tiny, alone):
    rng = random.Random(0)
    engine = tiny.engine(overlap="on", step_tokens=64, max_running=6)
    running, outputs, number = set(), {}, 0
    for _ in range(400 if on_cuda(tiny.model.device) else 40):
        if rng.random() < 0.5:
            request = rng.choice(tiny.requests)
            engine.submit(renamed(request, f"{request.request_id}-{number}"))
            running.add(f"{request.request_id}-{number}")
            number += 1
        if running and rng.random() < 0.4:
            doomed = rng.choice(sorted(running))
            engine.abort(doomed)
            running.discard(doomed)
            outputs.pop(doomed, None)
        for output in engine.step() if engine.has_work else ():
            if output.request_id in running:
                outputs.setdefault(output.request_id, []).append(output)
    for name, more in drain(engine).items():
        outputs.setdefault(name, []).extend(more)
    assert_at_rest(engine)
    survived = sorted(running)
    assert len(survived) > 3
    wanted = [alone[int(name.partition("-")[0])] for name in survived]
    assert_alike([said(outputs[name]) for name in survived], wanted)


def test_steady_decoding_waits_for_nothing_but_results(cuda, tiny):
    """Any hidden synchronisation, by a copy or a read of a number, raises here."""
    engine = tiny.engine(overlap="on", attention_backend="auto")
    for request in tiny.requests:
        engine.submit(renamed(request, request.request_id, max_tokens=100, logprobs=None))
    for _ in range(30):
        engine.step()
    assert len(engine.scheduler.decoding) == len(tiny.requests)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drain(engine)


def test_random_draws_wait_for_nothing_either(cuda, tiny):
    engine = tiny.engine(overlap="on")
    drawn = {"temperature": 0.8, "top_p": 0.9, "top_k": 50, "max_tokens": 100, "logprobs": None}
    for request in tiny.requests:
        engine.submit(renamed(request, request.request_id, presence_penalty=0.5, seed=7, **drawn))
    for _ in range(30):
        engine.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(40):
            engine.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    drain(engine)


def test_a_step_without_memory_costs_its_newest_request_alone(cuda, tiny, alone):
    engine = tiny.engine(overlap="on", step_tokens=8192)
    assert_alike(answered(engine, tiny.requests), alone)
    long = tiny.request("apple " * 3000, name="long", max_tokens=4)
    torch.cuda.empty_cache()
    room = torch.cuda.memory_reserved(cuda) + (8 << 20)
    torch.cuda.set_per_process_memory_fraction(room / torch.cuda.get_device_properties(cuda).total_memory)
    try:
        for request in tiny.requests:
            engine.submit(renamed(request, f"{request.request_id}-again"))
        engine.submit(long)
        outputs = drain(engine)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    last = outputs["long"][-1]
    assert (last.finish_reason, last.error_code) == ("error", "out_of_memory")
    assert_alike([said(outputs[f"{r.request_id}-again"]) for r in tiny.requests], alone)
    engine.submit(renamed(long, "later"))
    assert drain(engine)["later"][-1].finish_reason == "length"
    assert_at_rest(engine)


def test_keys_and_values_take_what_the_rest_leaves(cuda, tiny, alone):
    """Where no size is asked for. Slots so far apart that 32 bits cannot tell them are addressed right."""
    engine = tiny.engine(kv_cache_mib=None, max_running=8, prefix_caching=False)
    total = torch.cuda.get_device_properties(cuda).total_memory
    assert 0.5 * total < engine.kv.data.nbytes < total
    assert_alike(answered(engine, tiny.requests), alone)
    pages = engine.kv.allocator
    taken = pages.allocate(pages.free - 200)  # what comes now stands at the pool's end, or in its middle
    assert taken is not None
    assert_alike(answered_in_between(engine, tiny.requests), alone)


def answered_in_between(engine, requests):
    """As ``answered``, while somebody else has pages."""
    for request in requests:
        engine.submit(renamed(request, f"{request.request_id}-late"))
    outputs = {}
    while engine.has_work:
        for output in engine.step():
            outputs.setdefault(output.request_id, []).append(output)
    return [said(outputs[f"{r.request_id}-late"]) for r in requests]
