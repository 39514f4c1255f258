import asyncio
import math

import msgspec
import numpy as np

from mmserve.core.messages import PromptLogprobs
from mmserve.server.prompt_logprobs import prompt_logprobs_body

FOUND = PromptLogprobs(
    token_ids=np.array([5, 6, 7], np.int32),
    logprobs=np.array([-0.5, -math.inf], np.float32),
    ranks=np.array([1, 9], np.int32),
    top_ids=np.array([[6, 8], [8, 6]], np.int32),
    top_logprobs=np.array([[-0.5, -1.5], [-0.25, -2.5]], np.float32),
    texts={5: b"a", 6: b"b", 7: b"\xf0", 8: b"d"},
)


def test_each_token_has_an_object_by_token_id_and_the_first_has_none():
    body = msgspec.json.decode(asyncio.run(prompt_logprobs_body(FOUND)))
    assert body == [
        None,
        {
            "6": {"logprob": -0.5, "rank": 1, "decoded_token": "b"},
            "8": {"logprob": -1.5, "rank": 2, "decoded_token": "d"},
        },
        {
            "7": {"logprob": -9999.0, "rank": 9, "decoded_token": "\ufffd"},
            "8": {"logprob": -0.25, "rank": 1, "decoded_token": "d"},
            "6": {"logprob": -2.5, "rank": 2, "decoded_token": "b"},
        },
    ]


def test_nothing_is_told_where_nothing_was_found():
    assert asyncio.run(prompt_logprobs_body(None)) is None
