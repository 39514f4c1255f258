"""tiny-vl's world in one import: ``sample_example``, ``corpus``, ``KINDS``, ``stream``, ``facts_hold``."""

from mmserve.models.tiny.questions import facts_hold
from mmserve.models.tiny.sampler import KINDS, corpus, photograph, sample_example, stream

__all__ = ["KINDS", "corpus", "facts_hold", "photograph", "sample_example", "stream"]
