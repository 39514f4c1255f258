"""tiny-vl's evaluation on the device, word for word that of the CPU."""

import asyncio

import pytest
from helpers.gpu_model import on_cuda

from mmserve.commands.evaluate import evaluate, questions
from mmserve.core.config import Config
from mmserve.service import Service

pytestmark = pytest.mark.gpu


def said(device, asked, **options):
    config = Config.of(device=device, dtype="float32", workers=0, **options).for_whole_answers()
    service = Service.load(config)
    try:
        return asyncio.run(evaluate(service, asked, config))
    finally:
        service.close()


def test_the_evaluation_equals_the_cpus(device):
    """In float32. A near tie may fall either way where sums are in another order: one answer in a hundred."""
    every = questions()
    asked = every[:: 8 if on_cuda(device) else 400]
    ours, theirs = said(device.type, asked), said("cpu", asked)
    assert len(ours) == len(asked)
    unlike = [(a.question, a.said, b.said) for a, b in zip(ours, theirs, strict=True) if a.said != b.said]
    assert len(unlike) <= len(asked) // 100, unlike
    assert sum(a.right for a in ours) >= 0.75 * len(asked)
