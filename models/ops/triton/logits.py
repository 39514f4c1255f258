"""All that requests ask to be done to their logits, in one pass over them.

What a row asks stands in two records, ``INT_COLUMNS`` and ``FLOAT_COLUMNS``, of which a batch has a matrix
each. They are made when requests come or go; from step to step only ``age`` changes, the number of tokens
that each row has had since, so nothing is uploaded and nobody is waited for.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton.runtime import Example

# ``step``: tokens generated; ``top_k``: 0 is off; ``state``: row of the counts, or -1; ``text``: row of
# the texts, or -1, of which ``length`` is used; ``mask`` and ``grammar``: rows of the two kinds of bit masks,
# or -1; ``begin`` to ``end``: its entries. ``cut``, ``drawn`` and ``barring`` are 0 or 1.
INT_COLUMNS = (
    *("seed", "step", "drawn", "cut", "top_k", "barring"),
    *("state", "text", "length", "mask", "grammar", "begin", "end"),
)
FLOAT_COLUMNS = ("temperature", "top_p", "log_min_p", "repetition", "frequency", "presence")
INTS, FLOATS = tl.constexpr(len(INT_COLUMNS)), tl.constexpr(len(FLOAT_COLUMNS))
SEED, STEP, DRAWN, CUT, TOP_K, BARRING = (tl.constexpr(i) for i in range(6))
STATE, TEXT, LENGTH, MASK, GRAMMAR, BEGIN, END = (tl.constexpr(i) for i in range(6, 13))
TEMPERATURE, TOP_P, LOG_MIN_P, REPETITION, FREQUENCY, PRESENCE = (tl.constexpr(i) for i in range(6))

PROMPT = 1 << 30  # in the counts: stands in the prompt. Below it: how often it stands in the answer
IN_PROMPT = tl.constexpr(PROMPT)

TILE = 2048  # logits of one program
BLOCK = 128  # logits that have one maximum and one sum


class Edits(NamedTuple):
    """``ints`` int64 [R, INTS], ``floats`` float32 [R, FLOATS]; ``counts`` int32 [S, vocab]; ``masks`` and
    ``grammars`` int32 [M, ceil(vocab / 32)], bit t of word t // 32: whether token t may come; ``tokens``
    int32 and ``values`` float32 [E], each to be added to a logit, none where the token is negative."""

    ints: torch.Tensor
    floats: torch.Tensor
    counts: torch.Tensor
    masks: torch.Tensor
    grammars: torch.Tensor
    tokens: torch.Tensor
    values: torch.Tensor


class Words(NamedTuple):
    """Words of which the last token may not come behind the others: ``begins`` int32 [W, length], in which
    ``metas`` int32 [W, 4] says (row, entry, last token, tokens of the beginning)."""

    begins: torch.Tensor
    metas: torch.Tensor


class Work(NamedTuple):
    """``logits`` float32 [R, width] over the temperature, -inf from the vocabulary's end on; ``maxima`` and
    ``sums`` float32 [R, width / BLOCK] of its blocks, sums of exp(logit - maximum)."""

    logits: torch.Tensor
    maxima: torch.Tensor
    sums: torch.Tensor


@triton.jit
def allowed(masks, row, words, at, there):
    """The bits of tokens ``at`` in row ``row`` of ``masks``."""
    word = tl.load(masks + row * words + at // 32, there, other=0)
    return ((word >> (at % 32)) & 1) != 0


@triton.jit
def edit_kernel(
    logits,
    logits_row,
    vocab,
    work,
    maxima,
    sums,
    ints,
    floats,
    counts,
    masks,
    grammars,
    tokens,
    values,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program TILE logits of a row. Penalties, biases, what may come, temperature, in this order."""
    row, tile = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tiles = tl.num_programs(1)
    at = tile * TILE + tl.arange(0, TILE)
    there = at < vocab
    own, real = ints + row * INTS, floats + row * FLOATS
    x = tl.load(logits + row * logits_row + at, there, other=float("-inf")).to(tl.float32)
    state = tl.load(own + STATE)
    if state >= 0:
        seen = tl.load(counts + state * vocab + at, there, other=0)
        said = seen & (IN_PROMPT - 1)
        repetition = tl.load(real + REPETITION)
        repeated = tl.where(x > 0, tl.div_rn(x, repetition + 0 * x), x * repetition)
        x = tl.where(seen != 0, repeated, x)
        x -= tl.load(real + FREQUENCY) * said.to(tl.float32)
        x -= tl.where(said > 0, tl.load(real + PRESENCE), 0.0)
    begin, end = tl.load(own + BEGIN), tl.load(own + END)
    for entry in range(begin, end):
        x += tl.where(at == tl.load(tokens + entry), tl.load(values + entry), 0.0)
    words = (vocab + 31) // 32
    mask = tl.load(own + MASK)
    if mask >= 0:
        x = tl.where(allowed(masks, mask, words, at, there), x, float("-inf"))
    grammar = tl.load(own + GRAMMAR)
    if grammar >= 0:
        x = tl.where(allowed(grammars, grammar, words, at, there), x, float("-inf"))
    x = tl.div_rn(x, tl.load(real + TEMPERATURE) + tl.zeros_like(x))
    tl.store(work + row * tiles * TILE + at, x)
    blocks = tl.reshape(x, (TILE // BLOCK, BLOCK))
    top = tl.max(blocks, 1)
    level = tl.where(top == float("-inf"), 0.0, top)
    place = (row * tiles + tile) * (TILE // BLOCK) + tl.arange(0, TILE // BLOCK)
    tl.store(maxima + place, top)
    tl.store(sums + place, tl.sum(tl.exp(blocks - level[:, None]), 1))


@triton.jit(do_not_specialize=["age", "length"])
def words_kernel(begins, metas, ints, texts, tokens, texts_row, age, length, LENGTH_MOST: tl.constexpr):
    """One program a word: its entry forbids its last token if the text ends with the others, else nothing."""
    word = tl.program_id(0)
    row, entry = tl.load(metas + word * 4).to(tl.int64), tl.load(metas + word * 4 + 1)
    last, count = tl.load(metas + word * 4 + 2), tl.load(metas + word * 4 + 3)
    at = tl.arange(0, LENGTH_MOST)
    part = at < count
    place = tl.load(ints + row * INTS + LENGTH) + age - count + at
    text = texts + tl.load(ints + row * INTS + TEXT) * texts_row
    said = tl.load(text + place, part & (place >= 0), other=-1)
    wanted = tl.load(begins + word * length + at, part, other=-1)
    differs = tl.sum((part & (said != wanted)).to(tl.int32), 0)
    tl.store(tokens + entry, tl.where(differs == 0, last, -1))


def width_of(vocab: int) -> int:
    """Of ``Work.logits``."""
    return triton.cdiv(vocab, TILE) * TILE


def room(rows: int, vocab: int, device: torch.device) -> Work:
    """For ``edit`` of that many rows."""
    width = width_of(vocab)
    shapes = ((rows, width), (rows, width // BLOCK), (rows, width // BLOCK))
    return Work(*(torch.empty(shape, dtype=torch.float32, device=device) for shape in shapes))


def edit(logits: torch.Tensor, edits: Edits, work: Work) -> None:
    """What becomes of ``logits`` [R, vocab], whose rows may lie apart, by the R rows of ``edits.ints``."""
    rows, vocab = logits.shape
    assert logits.stride(1) == 1
    if rows:
        edit_kernel[rows, width_of(vocab) // TILE](
            *(logits, logits.stride(0), vocab, *work, *edits), TILE=TILE, BLOCK=BLOCK, num_warps=4
        )


def bar_words(words: Words, ints: torch.Tensor, texts: torch.Tensor, tokens: torch.Tensor, age: int) -> None:
    """Set the entries ``tokens`` of all ``words``, by ``texts`` int32 [S, longest] after ``age`` tokens."""
    count, length = words.begins.shape
    words_kernel[count,](
        *(*words, ints, texts, tokens, texts.stride(0), age, length),
        LENGTH_MOST=triton.next_power_of_2(length),
        num_warps=1,
    )


EXAMPLES = [
    Example(
        edit_kernel,
        {"logits": kind, "logits_row": "i32", "vocab": "i32"}
        | dict.fromkeys(("work", "maxima", "sums", "floats", "values"), "*fp32")
        | {"ints": "*i64"}
        | dict.fromkeys(("counts", "masks", "grammars", "tokens"), "*i32"),
        {"TILE": TILE, "BLOCK": BLOCK},
        aligned=("logits_row", "vocab"),
        options={"num_warps": 4},
    )
    for kind in ("*bf16", "*fp32")
] + [
    Example(
        words_kernel,
        {"begins": "*i32", "metas": "*i32", "ints": "*i64", "texts": "*i32", "tokens": "*i32"}
        | dict.fromkeys(("texts_row", "age", "length"), "i32"),
        {"LENGTH_MOST": 4},
        options={"num_warps": 1},
    )
]
