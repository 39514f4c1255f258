import asyncio
import io
import subprocess
import sys
import threading
import time
from concurrent.futures import CancelledError

import numpy as np
import pytest
from helpers.media_files import clip_file
from PIL import Image

from mmserve import LLM, SamplingParams
from mmserve.core.errors import (
    ConfigError,
    ContextLengthExceeded,
    EngineDead,
    InvalidGrammar,
    InvalidRequest,
    MediaError,
    MMServeError,
)
from mmserve.core.messages import ChatInput, Grammar
from mmserve.preprocess.bad_words import spelled

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def picture(seed=0, size=(64, 96)):
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (*size, 3), dtype=np.uint8))


def ask(*parts, text="describe the picture"):
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def image(value):
    return {"type": "image", "image": value}


def test_one_picture_in_any_form_is_one_answer(llm, tmp_path):
    shown = picture()
    file = io.BytesIO()
    shown.save(file, "PNG")
    path = tmp_path / "picture.png"
    path.write_bytes(file.getvalue())
    forms = [shown, np.asarray(shown), file.getvalue(), path, str(path)]
    answers = llm.chat([ask(image(form)) for form in forms], GREEDY)
    assert len({tuple(a.token_ids) for a in answers}) == 1
    assert answers[0].usage.image_tokens == 6
    assert answers[0].usage.completion_tokens == len(answers[0].token_ids) == 8


def test_different_pictures_are_different_answers_in_the_order_of_the_questions(llm):
    conversations = [ask(image(picture(i))) for i in range(6)]
    together = llm.chat(conversations, GREEDY)
    alone = [llm.chat(c, GREEDY)[0] for c in conversations]
    assert [a.token_ids for a in together] == [a.token_ids for a in alone]
    assert len({tuple(a.token_ids) for a in together}) > 1


def test_a_clip_by_path_counts_video_tokens(llm, tmp_path):
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip_file(8, size=(64, 64)))
    (answer,) = llm.chat(ask({"type": "video", "video": str(path)}, text="what is in this clip"), GREEDY)
    assert answer.usage.video_tokens > 0
    assert answer.usage.image_tokens == 0
    assert answer.finish_reason == "length"


def test_raw_prompts_with_and_without_pictures(llm):
    slot = "<|vision_start|><|image_pad|><|vision_end|>"
    text, seen = llm.generate(["Hello world", {"prompt": f"Look at {slot}", "media": [picture()]}], GREEDY)
    assert text.usage.prompt_tokens == len(llm.service.tokenize("Hello world"))
    assert seen.usage.image_tokens == 6


def test_text_is_what_the_tokens_say(llm):
    for answer in llm.generate(["Hello", "the picture"], GREEDY):
        assert answer.text == llm.service.processor.decode(answer.token_ids)


def test_stop_strings_end_the_answer_before_them(llm):
    (free,) = llm.generate("Hello world", GREEDY)
    stop = free.text[2:4]
    (cut,) = llm.generate("Hello world", GREEDY, stop=[stop])
    assert cut.text == free.text[: free.text.find(stop)]
    assert cut.finish_reason == "stop"
    assert cut.usage.completion_tokens < 8


def test_logprobs_spell_the_tokens(llm):
    (answer,) = llm.generate(
        "Hello", SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, logprobs=2)
    )
    assert len(answer.logprobs) == 4
    assert b"".join(p.token for p in answer.logprobs).decode(errors="replace").startswith(answer.text[:1])
    assert all(p.top[0][1] == pytest.approx(p.logprob) for p in answer.logprobs)


def test_each_prompt_may_have_its_own_sampling(llm):
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (1, 3)]
    assert [len(a.token_ids) for a in llm.generate(["a", "b"], params)] == [1, 3]
    with pytest.raises(InvalidRequest, match="2 prompts but 1"):
        llm.generate(["a", "b"], params[:1])


def test_one_stop_string_is_one_and_not_its_letters(llm):
    (whole,) = llm.generate("Hello world", GREEDY)
    middle = whole.text[1:4]
    for stop in (middle, [middle]):
        (cut,) = llm.generate("Hello world", GREEDY, stop=stop)
        assert cut.text == whole.text[: whole.text.find(middle)]
    with pytest.raises(InvalidRequest, match="stop"):
        llm.generate("a", GREEDY, stop=[""])
    with pytest.raises(InvalidRequest, match="SamplingParams"):
        llm.generate("a", {"temperature": 0})


def test_errors_name_what_is_wrong(llm, tmp_path):
    with pytest.raises(MediaError, match="cannot read"):
        llm.chat(ask(image(str(tmp_path / "none.png"))), GREEDY)
    with pytest.raises(MediaError) as caught:
        llm.chat(ask(image(b"not a picture")), GREEDY)
    assert caught.value.param == "messages[0].content[0].image"
    with pytest.raises(ContextLengthExceeded, match="1024"):
        llm.generate("Hello", SamplingParams(max_tokens=2000))
    with pytest.raises(ConfigError, match="unknown option"):
        LLM("nowhere", colour="blue")
    (answer,) = llm.generate("Hello", GREEDY)
    assert len(answer.token_ids) == 8


def test_more_prompts_than_the_queue_holds(llm):
    params = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    assert len(llm.generate(["a"] * 300, params)) == 300


def test_a_closed_model_says_so_instead_of_hanging(llm):
    other = LLM(llm.config.model.model, kv_cache_mib=8)
    calls = []
    long = SamplingParams(temperature=0.0, max_tokens=900, ignore_eos=True)

    def call():
        with pytest.raises((MMServeError, CancelledError)):
            other.generate(["a"] * 8, long)
        calls.append("ended")

    under_way = threading.Thread(target=call)
    under_way.start()
    while not other.service.stats()["running"]:
        time.sleep(0.001)
    other.close()
    other.close()
    under_way.join(5)
    assert calls == ["ended"]
    with pytest.raises(EngineDead, match="closed"):
        other.generate("a")


async def test_it_works_inside_a_running_event_loop(llm):
    assert asyncio.get_running_loop().is_running()
    assert len(llm.generate(["a"], GREEDY)) == 1


def test_importing_the_names_needs_no_torch():
    code = "import mmserve, sys; mmserve.SamplingParams; mmserve.LLM; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_prompts_are_told_their_log_probabilities(llm):
    """The answer's own, had it been the prompt."""
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)
    [answer] = llm.generate("a cat", params)
    assert answer.prompt_logprobs is None
    prompt = tuple(llm.service.tokenize("a cat")) + tuple(answer.token_ids)
    asked = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=2)
    told = collect(llm, prompt, asked)
    assert told[0] is None
    assert [row.token_id for row in told[1:]] == list(prompt[1:])
    for row, entry in zip(told[-6:], answer.logprobs, strict=True):
        assert (row.token, row.rank) == (entry.token, 1)
        assert row.logprob == pytest.approx(entry.logprob, abs=1e-4)
        assert [text for _, text, _ in row.top] == [text for text, _ in entry.top]


def collect(llm, ids, sampling):
    """What is told of a prompt of token ids."""
    chat = ChatInput(request_id="ids", messages=(), prompt=ids, sampling=sampling)

    async def run():
        return [output.prompt_logprobs async for output in llm.service.generate(chat)]

    first, *others = asyncio.run(run())
    assert all(other is None for other in others)
    return list(first.rows())


def test_pictures_have_rows_too_and_chunks_change_nothing(llm):
    asked = SamplingParams(temperature=0.0, max_tokens=4, prompt_logprobs=1)
    conversation = ask(image(picture()))
    first, second = llm.chat([conversation, conversation], asked)
    assert len(first.prompt_logprobs) == first.usage.prompt_tokens
    assert first.usage.cached_tokens == second.usage.cached_tokens == 0
    for one, other in zip(first.prompt_logprobs[1:], second.prompt_logprobs[1:], strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-4)
    [plain] = llm.chat(conversation, SamplingParams(temperature=0.0, max_tokens=4))
    assert plain.token_ids == first.token_ids


def test_bad_words_do_not_come(llm):
    """Of two letters that may come, the one that is forbidden does not; nor a word of both."""
    letters = tuple(llm.service.tokenize("b") + llm.service.tokenize("c"))

    def said(*bad):
        params = SamplingParams(
            seed=3, max_tokens=30, ignore_eos=True, allowed_token_ids=letters, bad_words=bad
        )
        return llm.generate("a cat", params)[0].text

    assert set(said()) == {"b", "c"}
    assert (said("b"), said("c")) == ("c" * 30, "b" * 30)
    assert spelled(["bc"], llm.service.processor.text)[0] == letters
    assert "bc" in said()
    assert "bc" not in said("bc")


def test_allowed_tokens_are_all_that_comes(llm):
    allowed = tuple(llm.service.tokenize("a b c"))
    params = SamplingParams(temperature=1.0, seed=1, max_tokens=8, ignore_eos=True, allowed_token_ids=allowed)
    [answer] = llm.generate("a cat", params)
    assert set(answer.token_ids) <= set(allowed)


@pytest.mark.parametrize(
    "field",
    [
        {"bad_words": ("",)},
        {"bad_words": ("x" * 300,)},
        {"bad_words": ("a",) * 129},
        {"allowed_token_ids": (10**6,)},
        {"prompt_logprobs": 21},
    ],
)
def test_sampling_out_of_range_is_refused_by_name(llm, field):
    with pytest.raises(InvalidRequest) as refused:
        llm.generate("a", SamplingParams(**field))
    assert refused.value.param == next(iter(field))


def test_what_the_engine_ends_a_request_with_is_an_error_of_its_kind(llm):
    form = Grammar("regex", "(a{1000}){1000}", "sampling.grammar")  # small, but not when it is met
    with pytest.raises(InvalidGrammar, match="too many expressions") as caught:
        llm.chat(ask(), SamplingParams(temperature=0.0, max_tokens=8, grammar=form))
    assert "<state>" not in caught.value.message
