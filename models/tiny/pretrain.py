"""The first stage of training: the vision transformer alone, on pictures whose every token is labelled.

    python -m mmserve.models.tiny.pretrain --out RUN --minutes 20

Writes RUN/vision.pt, from which ``train`` starts its vision transformer, and RUN/pretrain.log.
"""

import argparse
import os
import pickle
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file

from mmserve.models.tiny import checkpoint, look
from mmserve.models.tiny.assist import Assistants
from mmserve.models.tiny.net import Vision
from mmserve.models.tiny.optim import Optimizer
from mmserve.models.tiny.sampler import stream

BATCH, LOG_STEPS, SAVE_SECONDS = 40, 50, 120.0
WARMUP_STEPS, DECAY_FROM = 60, 0.3


def rate_scale(progress: float, steps: int) -> float:
    fall = min(1.0, (1 - progress) / (1 - DECAY_FROM))
    return min(1.0, (steps + 1) / WARMUP_STEPS) * max(fall, 0.02)


class Pretraining:
    """One run of the first stage; what it learned is ``vision``, a state dict of averaged weights."""

    def __init__(
        self, folder: Path, vision_config: dict, start: dict | None, workers: int, seed: int, rate: float
    ) -> None:
        torch.manual_seed(seed)
        visual = Vision(vision_config)
        self.folder, self.seed, self.workers, self.rate = folder, seed, workers, rate
        self.config = vision_config
        self.looker = look.Looker(visual, vision_config["out_hidden_size"])
        if start is not None:
            self.looker.load_state_dict(look.fitting(start, self.looker.state_dict()))
        self.optimizer = Optimizer(self.looker)
        self.looker.bfloat16()
        self.test = [look.draw_looks(stream("valid", 5, i), 32, s) for i in range(4) for s in (0.0, 0.6)]

    def averaged(self) -> look.Looker:
        net = look.Looker(Vision(self.config), self.config["out_hidden_size"])
        net.load_state_dict(dict(zip(self.optimizer.names, self.optimizer.average, strict=True)))
        return net

    def save(self) -> None:
        partial = self.folder / "vision.pt.partial"
        torch.save(self.averaged().state_dict(), partial)
        partial.replace(self.folder / "vision.pt")

    def accuracy(self) -> tuple[float, float]:
        """Of subjects named, on clean and on badly photographed pictures."""
        with torch.compiler.set_stance("force_eager"):
            net = self.averaged()
            rights = [net.accuracy(looks) for looks in self.test]
        return sum(rights[::2]) / len(rights[::2]), sum(rights[1::2]) / len(rights[1::2])

    def train(self, minutes: float) -> None:
        context = mp.get_context("spawn")
        queue = context.Queue(maxsize=8)
        drawer = context.Process(target=look.produce, args=(queue, [self.seed], BATCH), daemon=True)
        drawer.start()
        assistants = Assistants(self.looker, queue, self.workers - 1)
        self.looker.speed_up()
        try:
            self._loop(queue, assistants, minutes)
        finally:
            assistants.stop()
            drawer.terminate()
        self.save()

    def _loop(self, queue: mp.Queue, assistants: Assistants, minutes: float) -> None:
        start = saved = window = time.monotonic()
        mean = 0.0
        while (progress := (time.monotonic() - start) / (60 * minutes)) < 1.0:
            loss = self.looker.batch_loss(pickle.loads(queue.get()))
            loss.backward()
            assistants.gather()
            self.optimizer.step(self.rate * rate_scale(progress, self.optimizer.steps))
            assistants.release()
            mean += loss.item() / LOG_STEPS
            if self.optimizer.steps % LOG_STEPS == 0:
                now = time.monotonic()
                clean, bad = self.accuracy()
                line = f"step {self.optimizer.steps} min {(now - start) / 60:.1f} loss {mean:.3f}"
                self.log(f"{line} s/step {(now - window) / LOG_STEPS:.2f} clean {clean:.3f} bad {bad:.3f}")
                mean, window = 0.0, time.monotonic()
            if time.monotonic() - saved > SAVE_SECONDS:
                self.save()
                saved = time.monotonic()

    def log(self, text: str) -> None:
        with (self.folder / "pretrain.log").open("a", encoding="utf-8") as file:
            file.write(text + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="run folder")
    parser.add_argument("--minutes", type=float, default=20.0)
    parser.add_argument("--workers", type=int, default=2, help="processes that compute gradients")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rate", type=float, default=1.0, help="factor on both learning rates")
    parser.add_argument("--start", type=Path, help="a model folder, a run's state.pt or a vision.pt")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    start = _start(options.start)
    run = Pretraining(options.out, checkpoint.VISION, start, options.workers, options.seed, options.rate)
    run.train(options.minutes)


def _start(path: Path | None) -> dict | None:
    if path is None:
        return None
    if path.is_dir():
        state = load_file(path / "model.safetensors")
    else:
        state = torch.load(path, weights_only=False)
        state = state["optimizer"]["average"] if "optimizer" in state else state
    return {name.removeprefix("model."): weight for name, weight in state.items()}


if __name__ == "__main__":
    main()
