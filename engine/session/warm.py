"""Warm requests: a context that is computed and cached before anybody asks about it."""

from msgspec.structs import replace

from mmserve.core.messages import PreparedRequest, VisionItem


def warm_part(request: PreparedRequest, page_size: int) -> PreparedRequest:
    """The beginning of ``request`` that is worth computing: its whole pages, since others are not shared.

        0                             whole pages     the end
        |----------- computed -------------|-- left to ---|      an item that begins here is computed too:
                                              whoever asks       that it is encoded is most of its cost

    Items keep their features, of which the prompt takes those within.
    """
    whole = request.num_tokens // page_size * page_size
    stop = max([whole, *(item.span[1] for item in request.items if item.span[0] >= whole)])
    return replace(
        request,
        token_ids=request.token_ids[:stop],
        radix_keys=request.radix_keys[:stop],
        positions=request.positions[:, :stop],
        items=tuple(_within(item, stop) for item in request.items),
    )


def _within(item: VisionItem, stop: int) -> VisionItem:
    return item if item.span[1] <= stop else replace(item, span=(item.span[0], stop))
