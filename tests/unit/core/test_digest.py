from hypothesis import given
from hypothesis import strategies as st

from mmserve.core.digest import DIGEST_BYTES, framed_digest

FIELDS = st.lists(st.one_of(st.binary(max_size=4), st.text(max_size=3), st.integers()), max_size=4)


def test_field_borders_count() -> None:
    assert framed_digest("ab", "c") != framed_digest("a", "bc")
    assert framed_digest(b"1") != framed_digest("1") != framed_digest(1)
    assert len(framed_digest()) == DIGEST_BYTES


@given(FIELDS, FIELDS)
def test_only_equal_field_lists_share_a_digest(a: list, b: list) -> None:
    same = [(type(x), x) for x in a] == [(type(x), x) for x in b]
    assert (framed_digest(*a) == framed_digest(*b)) == same
