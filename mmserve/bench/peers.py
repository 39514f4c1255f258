"""transformers with the same shapes on the same device: what our figures stand beside.

``generate`` is what a script does, with its pixels and positions made ready beforehand. Continuous batching
(``generate_batch``) is for language models alone, so there it is Qwen3, which is the decoder without M-RoPE.
Times of a token are differences of two runs that differ in the number of tokens, so that prompts cancel out.
"""

import logging
import time
from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from mmserve.bench.roofline import synchronize
from mmserve.models.config import read_config

GENERATE, BATCHING = "generate", "continuous batching"
BLOCK = 256  # tokens of a page of continuous batching
SIZES = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps"),
)


class Transformers:
    """The model of ``folder`` with random weights. ImportError without transformers."""

    def __init__(self, folder: Path, device: torch.device, rounds: int = 3) -> None:
        import transformers

        transformers.logging.set_verbosity_error()
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.CRITICAL)
        self.version = transformers.__version__
        self.device, self._rounds = device, rounds
        self._folder, self._package = folder, transformers
        self._config = transformers.AutoConfig.from_pretrained(folder)
        self._sizes = read_config(folder)

    @cached_property
    def _model(self) -> Any:
        return self._made(self._package.Qwen3VLForConditionalGeneration, self._config)

    def _made(self, kind: Any, config: Any) -> Any:
        with torch.device(self.device):
            model = kind._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa")
        return model.to(self.device).eval()

    # ------------------------------------------------------------ generate

    def decode(self, batch: int, context: int, answer: int) -> float:
        """Tokens a second of ``batch`` answers behind prompts of ``context`` tokens."""
        prompt = self._text(batch, context)
        return batch / self._token_s(lambda tokens: self._generate(tokens, **prompt), answer)

    def prefill(self, tokens: int) -> float:
        """Tokens a second of one prompt."""
        prompt = self._text(1, tokens)
        return tokens / self._seconds(lambda: self._generate(1, **prompt))

    def first_token(self, grid: tuple[int, int], text: int) -> float:
        """Seconds to the first token behind a picture of ``grid`` patches and ``text`` tokens."""
        return self._seconds(lambda: self._generate(1, **self._picture(grid, text)))

    def encode(self, grid: tuple[int, int], pictures: int) -> float:
        """Vision tokens a second."""
        pixels, grids = self._pixels(grid, pictures)
        merge = self._sizes.vision.merge_size**2
        run = self._model.model.visual
        return pictures * grid[0] * grid[1] // merge / self._seconds(lambda: run(pixels, grid_thw=grids))

    def _generate(self, tokens: int, **inputs: Any) -> None:
        with torch.inference_mode():
            self._model.generate(
                **inputs, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, pad_token_id=0
            )

    def _text(self, batch: int, tokens: int) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, 1000, (batch, tokens), generator=generator).to(self.device)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def _picture(self, grid: tuple[int, int], text: int) -> dict[str, torch.Tensor]:
        sizes = self._sizes
        places = [sizes.image_token_id] * (grid[0] * grid[1] // sizes.vision.merge_size**2)
        ids = [sizes.vision_start_token_id, *places, sizes.vision_end_token_id, *range(10, 10 + text)]
        inputs = self._text(1, len(ids))
        inputs["input_ids"] = torch.tensor([ids], device=self.device)
        inputs["mm_token_type_ids"] = (inputs["input_ids"] == sizes.image_token_id).int()
        inputs["pixel_values"], inputs["image_grid_thw"] = self._pixels(grid, 1)
        return inputs

    def _pixels(self, grid: tuple[int, int], pictures: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Rows of two frames' patches, as the processor makes them of stills."""
        vision = self._sizes.vision
        rows, width = pictures * grid[0] * grid[1], 2 * vision.in_channels * vision.patch_size**2
        pixels = torch.rand(rows, width, device=self.device).bfloat16()
        return pixels, torch.tensor([[1, *grid]] * pictures, device=self.device)

    # ------------------------------------------------------------ continuous batching

    def batching(self, batch: int, context: int, answer: int) -> float:
        """As ``decode``."""
        prompts = self._text(batch, context)["input_ids"].tolist()
        kinds = self._package.generation.configuration_utils
        pages = kinds.ContinuousBatchingConfig(
            num_blocks=2 * batch + batch * (context + 2 * answer) // BLOCK + 8,
            max_batch_tokens=max(batch, min(batch * context, 8192)),
        )

        def run(tokens: int) -> None:
            asked = self._package.GenerationConfig(
                max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
            )
            answers = self._batching_model.generate_batch(
                prompts,
                generation_config=asked,
                continuous_batching_config=pages,
                persistent_manager=True,
            )
            if [len(a.generated_tokens) for a in answers.values()] != [tokens] * batch:
                raise RuntimeError("some answers are too short")

        try:
            return batch / self._token_s(run, answer)
        finally:
            self._batching_model.destroy_cached_continuous_batching_manager()

    @cached_property
    def _batching_model(self) -> Any:
        text = self._config.text_config
        config = self._package.Qwen3Config(**{name: getattr(text, name) for name in SIZES})
        return self._made(self._package.Qwen3ForCausalLM, config)

    # ------------------------------------------------------------ times

    def _token_s(self, run: Callable[[int], None], answer: int) -> float:
        """Seconds of a token: those that ``answer`` more of them take."""
        long, short = self._seconds(lambda: run(2 + answer)), self._seconds(lambda: run(2))
        if long <= short:
            raise RuntimeError("two runs differ by less than they vary")
        return (long - short) / answer

    def _seconds(self, work: Callable[[], Any]) -> float:
        """The median of some runs after one to warm up."""
        times = []
        with torch.inference_mode():
            for _ in range(1 + self._rounds):
                start = time.perf_counter()
                work()
                synchronize(self.device)
                times.append(time.perf_counter() - start)
        return median(times[1:])
