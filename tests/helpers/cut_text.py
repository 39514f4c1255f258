"""Texts cut into pieces, and what a parser makes of them."""

from hypothesis import strategies as st

from mmserve.parsing.events import CallArguments, CallBegin, CallBroken, CallEnd, Content, Reasoning, joined


def parsed(parser, pieces):
    """The joined events of all ``pieces``."""
    events = [event for piece in pieces for event in parser.feed(piece)]
    return joined([*events, *parser.finish()])


def told(events):
    """(thoughts, content, whole calls as (name, arguments)) of joined events."""
    names, arguments, calls = {}, {}, []
    for event in events:
        if isinstance(event, CallBegin):
            names[event.index] = event.name
        elif isinstance(event, CallArguments):
            arguments[event.index] = arguments.get(event.index, "") + event.text
        elif isinstance(event, CallEnd):
            calls.append((names[event.index], arguments[event.index]))
    return _text(events, Reasoning), _text(events, Content), calls


def broken(events):
    return sum(isinstance(event, CallBroken) for event in events)


def _text(events, kind):
    return "".join(event.text for event in events if isinstance(event, kind))


@st.composite
def cuts(draw, texts):
    """A text, and the same cut into pieces."""
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]
