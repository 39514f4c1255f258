"""Requests as the sampler sees them, and wishes of every kind for them."""

import numpy as np
from hypothesis import strategies as st

from mmserve.core.messages import PreparedRequest, SamplingParams
from mmserve.engine.kv.page_table import PageTable
from mmserve.engine.scheduler.request import Request


def request(name="r", prompt=(1, 2, 3), answer=(), seed=0, stop_ids=(), bad=(), **sampling):
    tokens = np.array(prompt, dtype=np.int32)
    prepared = PreparedRequest(
        request_id=name,
        token_ids=tokens,
        radix_keys=tokens.astype(np.int64),
        positions=np.zeros((3, len(tokens)), np.int32),
        position_delta=0,
        items=(),
        sampling=SamplingParams(**sampling),
        bad_words=bad,
    )
    made = Request(prepared, 0, 100, frozenset(stop_ids), PageTable(1), seed=seed)
    for token in answer:
        made.append(token)
    return made


def words(draw_from):
    return st.lists(st.lists(draw_from, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple)


SMALL = 40
token_ids = st.integers(0, SMALL - 1)
wishes = st.fixed_dictionaries(
    {},
    optional={
        "temperature": st.sampled_from([0.0, 1e-6, 0.5, 1.0, 1e6]),
        "top_k": st.sampled_from([0, 1, 3, SMALL, SMALL + 1, 10**12]),
        "top_p": st.sampled_from([0.0, 0.3, 0.95, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 1.0]),
        "repetition_penalty": st.sampled_from([0.7, 1.0, 1.4]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.8]),
        "presence_penalty": st.sampled_from([-0.5, 0.0, 0.8]),
        "logit_bias": st.dictionaries(token_ids, st.sampled_from([-100.0, -1.0, 2.0, 100.0]), max_size=3),
        "min_tokens": st.integers(0, 4),
        "stop_ids": st.sets(token_ids, max_size=3),
        "allowed_token_ids": st.lists(token_ids, min_size=1, max_size=5).map(tuple),
        "bad": words(token_ids),
        "logprobs": st.sampled_from([0, 1, 5]),
        "prompt": st.lists(token_ids, min_size=1, max_size=6).map(tuple),
        "seed": st.integers(-(2**63), 2**63 - 1),
    },
)
