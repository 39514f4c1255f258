"""Many sessions in any order of events: each reads its own keys at their positions, and no page is lost."""

from helpers.scheduler_world import PAGE_SIZE
from helpers.session_world import Session, SessionWorld
from hypothesis import given, settings
from hypothesis import strategies as st

from mmserve.engine.scheduler.request import Status

MOST = 48  # tokens of a trunk

EVENTS = st.lists(
    st.tuples(
        st.sampled_from(["grow", "grow", "ask", "drop", "rebase", "evict", "abort", "step", "step"]),
        st.integers(0, 2),
        st.integers(1, 12),
    ),
    max_size=40,
)


def carried(world, session, act):
    """``act`` on ``session`` carries over what it says it does, and nothing to anybody else."""
    before = world.salts()
    count = act()
    found = world.memory.prefixes.length(session.keys, (session.salt, None))
    assert count == found
    assert count % PAGE_SIZE == 0
    for salt, pages in world.salts().items():
        assert salt == (session.salt, None) or pages <= before[salt], "others gained pages"


def happen(world, session, event, number):
    match event:
        case "grow" if len(session.names) + number <= MOST:
            session.grow(number)
        case "ask":
            session.ask(number)
        case "drop":
            carried(world, session, lambda: session.drop(number + 4))
        case "rebase":
            carried(world, session, session.rebase)
        case "evict":
            world.evict(number)
        case "abort":
            running = [r for r in world.requests if r.status is not Status.FINISHED]
            for request in running[:1]:
                world.scheduler.finish(request, "abort")
        case "step":
            world.step()


@settings(max_examples=150, deadline=None)
@given(EVENTS, st.integers(20, 60))
def test_whatever_happens_to_sessions_each_reads_what_is_its_own(events, pages):
    world = SessionWorld(pages=1 + pages, step_tokens=16)
    sessions = [Session(world, number) for number in range(3)]
    for session in sessions:
        session.grow(16)
    world.drain_queue()
    for event, who, number in events:
        happen(world, sessions[who], event, number)
        world.scheduler.check_integrity()
    for session in sessions:
        session.ask(3)
    world.drain()
    assert all(r.finish_reason in ("stop", "length", "abort") for r in world.requests)


def test_a_session_of_any_length_holds_what_its_window_holds():
    """A hundred windows, each dropped in bulk and moved back: the cache has room for few, and every question
    finds its context."""
    world = SessionWorld(pages=1 + 40)
    session = Session(world, 0)
    for _ in range(100):
        for _ in range(4):
            session.grow(8)
            world.drain_queue()
        asked = session.ask(3)
        world.drain_queue()
        assert asked.cached_len >= len(session.names) - PAGE_SIZE
        assert session.drop(16) == session.rebase() == 20
        assert session.positions[-1] == 20
    assert world.read > 10_000
    world.drain()


def test_positions_stay_below_a_limit_that_is_far_below_what_was_seen():
    world = SessionWorld(pages=1 + 40)
    session = Session(world, 0)
    for _ in range(30):
        session.grow(12)
        world.drain_queue()
        session.drop(12)
        if session.positions[-1] > 100:
            session.rebase()
            assert session.positions[-1] == len(session.names) - 1
        session.ask(2)
        world.drain_queue()
    assert session.said > 300
    world.drain()
