from mmserve.preprocess.pieces import ENTRY_BYTES, PieceCache


def codes(text):
    return map(ord, text)


def test_what_was_met_before_is_not_encoded_again():
    cache = PieceCache(10_000)
    for text in ("ab", "", "ab", "日本", "ab"):
        assert list(cache.get(text, codes)) == list(codes(text))
    assert (cache.hits, cache.misses) == (2, 3)


def test_it_is_bounded_in_bytes_and_the_least_recently_used_goes_first():
    cache = PieceCache(10 * ENTRY_BYTES)
    cache.get("kept", codes)
    for i in range(50):
        cache.get(f"piece {i}", codes)
        cache.get("kept", codes)
        assert cache.nbytes <= cache.capacity
    assert cache.misses == 51
    cache.get("x" * 20 * ENTRY_BYTES, codes)
    assert cache.get("kept", codes)
    assert cache.misses == 52
