"""Choosing a token of each row by its own noise, without sorting the vocabulary.

A row's blocks of 128 logits have a maximum and a sum each (``logits.py``). A draw without cuts inverts the
distribution block first. With top-k, top-p or min-p it is decided by a threshold, the least logit that stays:

* Floats are ordered as integers of their bits (``key_of``). The threshold is the least key t with less than
  top_k logits, or less than top_p of the mass, above it: both fall as t grows, so t is searched for by
  pivots, eight at a time, each round leaving a ninth of the keys.
* The maxima alone give a lower bound: k blocks with a maximum above t have k logits above it, and the maxima
  above t have no more mass than all logits there. So only blocks that reach beyond the bound are looked at,
  in every round: about as many as there are candidates.

One program does a row, and reads nothing of others; sums are taken in a fixed order. So a token depends on
its row, its seed and its step alone. Noise, thresholds and draw are those of ``engine/sampling`` (noise.py,
draw.py).
"""

import torch
import triton
import triton.language as tl

from mmserve.models.ops.triton import logits as rows
from mmserve.models.ops.triton.logits import (
    BARRING,
    CUT,
    DRAWN,
    FLOATS,
    INTS,
    LENGTH,
    LOG_MIN_P,
    SEED,
    STATE,
    STEP,
    TEXT,
    TOP_K,
    TOP_P,
    Work,
)
from mmserve.models.ops.triton.runtime import Example

PIVOTS = 8
ROUNDS = tl.constexpr(6)  # for a bound by the maxima, which need not be exact
SURE = tl.constexpr(1 + 1e-5)  # more than sums may err
LEAST_KEY = tl.constexpr(-2139095041)  # of -inf
MANY = tl.constexpr(2147483647)


@triton.jit
def key_of(x):
    """int32 in the order of float32 ``x``; zeros of both signs are equal."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def value_of(key):
    """The float32 that has this ``key_of``."""
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit
def mixed(bits):
    """A round of SplitMix64."""
    bits = (bits ^ (bits >> 30)) * 0xBF58476D1CE4E5B9
    bits = (bits ^ (bits >> 27)) * 0x94D049BB133111EB
    return bits ^ (bits >> 31)


@triton.jit
def uniform_of(seed, step):
    """``noise.uniforms`` of int64 ``seed`` and ``step``: float64 in [0, 1)."""
    seed = seed.to(tl.uint64, bitcast=True)
    step = step.to(tl.uint64, bitcast=True)
    bits = mixed(mixed(seed + 0x9E3779B97F4A7C15) + (step + 1) * 0x9E3779B97F4A7C15)
    return (bits >> 11).to(tl.int64, bitcast=True).to(tl.float64) * (2.0**-53)


@triton.jit
def candidates(work, listed, count, first, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """(places in the row, logits) of the listed blocks from the ``first`` on, as many as fill TILE."""
    lane = tl.arange(0, TILE)
    entry = first + lane // BLOCK
    at = tl.load(listed + entry, entry < count, other=0) * BLOCK + lane % BLOCK
    return at, tl.load(work + at, entry < count, other=float("-inf"))


@triton.jit
def above(work, listed, count, pivots, top, PIVOTS: tl.constexpr, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """How many logits of the listed blocks have a key above each of ``pivots``, and their mass: float64."""
    numbers = tl.zeros((PIVOTS,), tl.int32)
    masses = tl.zeros((PIVOTS,), tl.float64)
    for first in range(0, count, TILE // BLOCK):
        _, x = candidates(work, listed, count, first, TILE, BLOCK)
        beyond = key_of(x)[None, :] > pivots[:, None]
        numbers += tl.sum(beyond.to(tl.int32), 1)
        masses += tl.sum(tl.where(beyond, tl.exp(x - top)[None, :], 0.0), 1).to(tl.float64)
    return numbers, masses


@triton.jit
def threshold(
    work,
    listed,
    count,
    low,
    high,
    wanted,
    top,
    BY_MASS: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The least key t in (low, high] above which there is less than ``wanted``; ``high`` if there is none.
    Or one between that and the next logit below it, which leaves the same."""
    number_low = tl.full((), MANY, tl.int32)  # of logits above ``low``, as far as is known
    number_high = tl.full((), 0, tl.int32)  # and above ``high``
    while high - low > 1:
        pivots = low + (high - low) * tl.arange(1, PIVOTS + 1) // (PIVOTS + 1)
        numbers, masses = above(work, listed, count, pivots.to(tl.int32), top, PIVOTS, TILE, BLOCK)
        if BY_MASS:
            less = (masses < wanted) & (pivots > low)
        else:
            less = (numbers.to(tl.float64) < wanted) & (pivots > low)
        number_low = tl.minimum(number_low, tl.min(tl.where(less, MANY, numbers), 0))
        number_high = tl.maximum(number_high, tl.max(tl.where(less, numbers, 0), 0))
        higher = tl.min(tl.where(less, pivots, high), 0)
        low = tl.max(tl.where(less, low, pivots), 0)
        high = tl.where(number_low - number_high <= 1, low + 1, higher)
    return low + 1


@triton.jit
def bound(keys, weights, low, high, wanted, PIVOTS: tl.constexpr):
    """A key in [low, high) as high as is found above which the ``weights`` of ``keys`` reach ``wanted``;
    ``low`` if there is none."""
    for _ in range(ROUNDS):
        pivots = low + (high - low) * tl.arange(1, PIVOTS + 1) // (PIVOTS + 1)
        beyond = keys[None, :] > pivots.to(tl.int32)[:, None]
        enough = tl.sum(tl.where(beyond, weights[None, :], 0.0), 1) >= wanted
        higher = tl.min(tl.where(enough, high, pivots), 0)
        low = tl.max(tl.where(enough, pivots, low), 0)
        high = tl.maximum(higher, low + 1)
    return low


@triton.jit
def first_beyond(work, listed, count, least, target, top, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """Of logits in the listed blocks with a key of at least ``least``, in their order: (the place of the
    first with which their mass goes beyond ``target``, or else of the last that has any, their mass)."""
    mass = tl.full((), 0.0, tl.float64)
    found, last = tl.full((), MANY, tl.int32), tl.full((), 0, tl.int32)
    for first in range(0, count, TILE // BLOCK):
        at, x = candidates(work, listed, count, first, TILE, BLOCK)
        weight = tl.where(key_of(x) >= least, tl.exp(x - top), 0.0).to(tl.float64)
        running = mass + tl.cumsum(weight, 0)
        has = weight > 0
        found = tl.minimum(found, tl.min(tl.where(has & (running > target), at, MANY), 0))
        last = tl.maximum(last, tl.max(tl.where(has, at, 0), 0))
        mass = tl.max(running, 0)
    return tl.minimum(found, last), mass


@triton.jit
def reaching(keys, low, listed, BLOCKS: tl.constexpr):
    """How many blocks have a maximum above ``low``; they are ``listed`` in their order."""
    reach = keys.to(tl.int64) > low
    place = tl.cumsum(reach.to(tl.int32), 0) - 1
    tl.store(listed + place, tl.arange(0, BLOCKS), reach)
    tl.debug_barrier()  # other threads read what was stored
    return tl.sum(reach.to(tl.int32), 0)


@triton.jit
def kept_of(
    work,
    listed,
    own,
    real,
    keys,
    maxima,
    total,
    top,
    vocab,
    BLOCKS: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """(the least key that min-p, top-k and top-p leave, in this order; how many blocks are ``listed`` that
    may have one as large). ``keys`` and ``maxima`` [BLOCKS] are those of the row's blocks, ``total`` its
    mass."""
    top_k, top_p = tl.load(own + TOP_K), tl.load(real + TOP_P).to(tl.float64)
    ranked = (top_k > 0) & (top_k < vocab)
    high = tl.max(keys, 0).to(tl.int64)
    floor = key_of(top + tl.load(real + LOG_MIN_P)).to(tl.int64)
    low = tl.minimum(tl.maximum(floor - 1, LEAST_KEY), high - 1)
    floored = low > LEAST_KEY
    if ranked:
        low = bound(keys, tl.where(keys > LEAST_KEY, 1.0, 0.0), low, high, top_k.to(tl.float32), PIVOTS)
    elif (top_p < 1) & (low == LEAST_KEY):
        wanted = (top_p * total * SURE).to(tl.float32)
        low = bound(keys, tl.exp(maxima - top), low, high, wanted, PIVOTS)
    count = reaching(keys, low, listed, BLOCKS)
    if ranked:
        places = top_k.to(tl.float64)
        low = threshold(work, listed, count, low, high, places, top, False, PIVOTS, TILE, BLOCK) - 1
    mass = total
    if ranked | floored:
        pivots = (low + tl.zeros((PIVOTS,), tl.int64)).to(tl.int32)
        numbers, masses = above(work, listed, count, pivots, top, PIVOTS, TILE, BLOCK)
        mass, number = tl.max(masses, 0), tl.max(numbers, 0)
        if ranked & (number > top_k):  # equal ones at the threshold: all stay, but only so many have places
            surplus = (number - top_k).to(tl.float64)
            mass -= surplus * tl.exp(value_of((low + 1).to(tl.int32)) - top).to(tl.float64)
    if top_p < 1:
        low = threshold(work, listed, count, low, high, top_p * mass, top, True, PIVOTS, TILE, BLOCK) - 1
    return (low + 1).to(tl.int32), count


@triton.jit
def drawn_cut(work, listed, count, least, uniform, top, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """The place of a token drawn from the logits of the listed blocks with a key of at least ``least``."""
    _, mass = first_beyond(work, listed, count, least, float("inf"), top, TILE, BLOCK)
    found, _ = first_beyond(work, listed, count, least, uniform * mass, top, TILE, BLOCK)
    return found


@triton.jit
def drawn_whole(work, sums, uniform, top, BLOCKS: tl.constexpr, BLOCK: tl.constexpr):
    """The place of a token drawn from a whole row: ``sums`` [BLOCKS] are the masses of its blocks."""
    running = tl.cumsum(sums, 0)
    mass = tl.max(running, 0)
    target = uniform * mass
    block = inverted(running, target, mass)
    before = tl.max(tl.where(tl.arange(0, BLOCKS) < block, running, 0.0), 0)
    at = block * BLOCK + tl.arange(0, BLOCK)
    inner = tl.cumsum(tl.exp(tl.load(work + at) - top).to(tl.float64), 0)
    return block * BLOCK + inverted(inner, target - before, tl.max(inner, 0))


@triton.jit
def inverted(running, target, mass):
    """Where ``running`` sums first go beyond ``target``, but not behind where they reach ``mass``."""
    found = tl.sum((running <= target).to(tl.int32), 0)
    return tl.minimum(found, tl.sum((running < mass).to(tl.int32), 0))


@triton.jit(do_not_specialize=["age"])
def choose_kernel(
    work,
    maxima,
    sums,
    ints,
    floats,
    listed,
    counts,
    texts,
    chosen,
    barred,
    vocab,
    width,
    blocks,
    texts_row,
    age,
    BLOCKS: tl.constexpr,
    PIVOTS: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One program a row: its token, whether it had none to choose from, and what is remembered of it."""
    row = tl.program_id(0).to(tl.int64)
    own, real, x = ints + row * INTS, floats + row * FLOATS, work + row * width
    block = tl.arange(0, BLOCKS)
    there = block < blocks
    most = tl.load(maxima + row * blocks + block, there, other=float("-inf"))
    top = tl.max(most, 0)
    if tl.load(own + DRAWN) != 0:
        uniform = uniform_of(tl.load(own + SEED), tl.load(own + STEP) + age)
        mass = tl.load(sums + row * blocks + block, there, other=0.0) * tl.exp(most - top)
        mass = tl.where(most > float("-inf"), mass, 0.0).to(tl.float64)
        if tl.load(own + CUT) != 0:
            some = listed + row * BLOCKS
            total = tl.sum(mass, 0)
            least, count = kept_of(
                *(x, some, own, real, key_of(most), most, total, top, vocab, BLOCKS, PIVOTS, TILE, BLOCK)
            )
            token = drawn_cut(x, some, count, least, uniform, top, TILE, BLOCK)
        else:
            token = drawn_whole(x, mass, uniform, top, BLOCKS, BLOCK)
    else:
        first = tl.min(tl.where(most == top, block, BLOCKS - 1), 0)
        at = first * BLOCK + tl.arange(0, BLOCK)
        token = tl.min(tl.where(tl.load(x + at, at < width, other=float("-inf")) == top, at, MANY), 0)
    token = tl.minimum(token, vocab - 1)
    tl.store(chosen + row, token.to(tl.int64))
    tl.store(barred + row, ((top == float("-inf")) & (tl.load(own + BARRING) != 0)).to(tl.int8))
    state, text = tl.load(own + STATE), tl.load(own + TEXT)
    if state >= 0:
        aim = counts + state * vocab + token
        tl.atomic_add(aim, 1, sem="relaxed")
    if text >= 0:
        tl.store(texts + text * texts_row + tl.load(own + LENGTH) + age, token)


def choose(
    work: Work,
    edits: rows.Edits,
    texts: torch.Tensor,
    listed: torch.Tensor,
    vocab: int,
    age: int,
    chosen: torch.Tensor,
    barred: torch.Tensor,
) -> None:
    """Tokens of the R rows that ``edits`` tell of into ``chosen`` int64 [R], each of the vocabulary, and into
    ``barred`` int8 [R] whether all were forbidden. Counts and ``texts`` int32 [S, longest] get the tokens.
    ``listed`` int32 [R, ``blocks_in(vocab)``] is room to work in; ``age`` tokens were chosen before by these
    records."""
    count, width = chosen.shape[0], work.logits.shape[1]
    if count:
        choose_kernel[count,](
            *(*work, edits.ints, edits.floats, listed, edits.counts, texts, chosen, barred),
            *(vocab, width, width // rows.BLOCK, texts.stride(0), age),
            BLOCKS=blocks_in(vocab),
            PIVOTS=PIVOTS,
            TILE=rows.TILE,
            BLOCK=rows.BLOCK,
            num_warps=8,
        )


def blocks_in(vocab: int) -> int:
    """Blocks of a row, up to a power of two."""
    return triton.next_power_of_2(rows.width_of(vocab) // rows.BLOCK)


EXAMPLES = [
    Example(
        choose_kernel,
        dict.fromkeys(("work", "maxima", "sums", "floats"), "*fp32")
        | {"ints": "*i64", "chosen": "*i64", "barred": "*i8"}
        | dict.fromkeys(("listed", "counts", "texts"), "*i32")
        | dict.fromkeys(("vocab", "width", "blocks", "texts_row", "age"), "i32"),
        {"BLOCKS": 2048, "PIVOTS": PIVOTS, "TILE": rows.TILE, "BLOCK": rows.BLOCK},
        aligned=("width", "vocab", "blocks", "texts_row"),
        options={"num_warps": 8},
    )
]
