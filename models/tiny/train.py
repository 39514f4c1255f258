"""Train tiny-vl on pictures that a helper process draws.

    python -m mmserve.models.tiny.train --out RUN --minutes 90 [--resume | --start DIR --trained 60]
    python -m mmserve.models.tiny.train --export RUN [DEST]

A run folder holds tokenizer.json, state.pt (written whole, then renamed), train.log, eval.log and, if
wanted, weights.json: {"kinds": {kind: weight}, "tasks": {task: weight}}, read again as training goes.
"""

import argparse
import os
import pickle
import signal
import time
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # read when torch is imported

import torch
import torch.multiprocessing as mp
from safetensors.torch import load_file
from tokenizers import Tokenizer

from mmserve.models.tiny import checkpoint, feed, tokenizer, world
from mmserve.models.tiny.assist import Assistants
from mmserve.models.tiny.batches import Batch, Layout
from mmserve.models.tiny.evaluate import held_out, score, table
from mmserve.models.tiny.look import Learner, Looks, speaking
from mmserve.models.tiny.net import TinyVL
from mmserve.models.tiny.optim import Optimizer

VOCAB = 1792
SAVE_SECONDS, EVAL_SECONDS, LOG_STEPS = 180.0, 360.0, 20
WARMUP_STEPS, SETTLE_STEPS, DECAY_FROM = 60, 80, 0.45


def rate_scale(progress: float, steps: int) -> float:
    """Warm up by steps, hold, then fall linearly to nothing at the end of the time."""
    fall = min(1.0, (1 - progress) / (1 - DECAY_FROM))
    return min(1.0, (steps + 1) / WARMUP_STEPS) * max(fall, 0.005)


class Run:
    """One training run: the net, its optimizer, the time spent so far, and where it is kept."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.folder, self.minutes, self.seed = options.out, options.minutes, options.seed
        self.workers, self.rate = options.workers, options.rate
        self.elapsed, self.batches = 0.0, 0
        self.folder.mkdir(parents=True, exist_ok=True)
        self._keep_tokenizer(options)
        torch.manual_seed(self.seed)
        self.net = Learner(checkpoint.config(self.tokenizer))
        self.optimizer = Optimizer(self.net)
        self.net.bfloat16()
        if options.resume:
            self._resume()
        elif options.start:
            weights = load_file(options.start / "model.safetensors")
            self.optimizer.adopt({n: w.float() for n, w in weights.items()}, SETTLE_STEPS)
            self.elapsed = 60 * options.trained
        if (self.folder / "vision.pt").exists():
            self._adopt_vision(self.folder / "vision.pt")

    def _keep_tokenizer(self, options: argparse.Namespace) -> None:
        """The run's own tokenizer: that of the weights it starts from, or a new one."""
        path = self.folder / "tokenizer.json"
        if options.start and not options.resume:
            path.write_bytes((options.start / "tokenizer.json").read_bytes())
        elif not options.resume:
            tokenizer.build(world.corpus(20000, self.seed), VOCAB).save(str(path))
        self.tokenizer = Tokenizer.from_file(str(path))

    def _resume(self) -> None:
        state = torch.load(self.folder / "state.pt", weights_only=False)
        self.optimizer.load(state["optimizer"])
        self.elapsed, self.batches = state["elapsed"], state["batches"]

    def _adopt_vision(self, path: Path) -> None:
        """Start the vision transformer from the first stage, once: the file is renamed."""
        weights = torch.load(path)
        named = {f"model.{n}" if n.startswith("visual.") else n: w for n, w in weights.items()}
        self.optimizer.adopt(named, SETTLE_STEPS)
        path.rename(path.with_suffix(".used.pt"))

    @property
    def progress(self) -> float:
        return min(1.0, self.elapsed / (60 * self.minutes))

    def scale(self) -> float:
        return self.rate * rate_scale(self.progress, self.optimizer.steps)

    def save(self) -> None:
        state = {"optimizer": self.optimizer.state(), "elapsed": self.elapsed, "batches": self.batches}
        partial = self.folder / "state.pt.partial"
        torch.save(state, partial)
        partial.replace(self.folder / "state.pt")

    def log(self, name: str, text: str) -> None:
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(text + "\n")

    def step(self, batch: tuple[Batch, Looks]) -> tuple[float, float]:
        loss = self.net.batch_loss(batch)
        loss.backward()
        self.assistants.gather()
        torch.set_num_threads(self.workers)  # the helpers wait, so their cores are free
        norm = self.optimizer.step(self.scale())
        torch.set_num_threads(1)
        self.assistants.release()
        self.batches += 1
        return loss.item(), norm

    def evaluate(self, sets: dict[str, list[Batch]]) -> None:
        net = TinyVL(checkpoint.config(self.tokenizer))
        net.load_state_dict(speaking(self.optimizer.state()["average"]))
        start = time.monotonic()
        with torch.compiler.set_stance("force_eager"):
            net.bfloat16().eval()
            tables = [f"-- {name}\n{table(score(net, batches))}" for name, batches in sets.items()]
        head = (
            f"== {self.elapsed / 60:.1f} min, step {self.optimizer.steps}, {time.monotonic() - start:.0f} s"
        )
        self.log("eval.log", "\n".join([head, *tables]))

    def train(self) -> None:
        context = mp.get_context("spawn")
        progress, queue = context.Value("d", self.progress), context.Queue(maxsize=8)
        arguments = (queue, progress, self.folder, [self.seed, self.batches])
        drawer = context.Process(target=feed.produce, args=arguments, daemon=True)
        drawer.start()
        self.assistants = Assistants(self.net, queue, self.workers - 1)
        self.net.speed_up()
        layout = Layout(self.tokenizer)
        test = {"clean": held_out(layout, 0.0), "camera": held_out(layout, 0.6)}
        try:
            self._loop(queue, progress, test)
        except KeyboardInterrupt:
            test = {}
        finally:
            self.assistants.stop()
            drawer.terminate()
        self.save()
        if test:
            self.evaluate(test)

    def _loop(self, queue: mp.Queue, progress, test: dict[str, list[Batch]]) -> None:
        saved, evaluated = self.elapsed, self.elapsed
        mean, waited, pictures = 0.0, 0.0, 0
        last = time.monotonic()
        window = last
        while self.progress < 1.0:
            before = time.monotonic()
            batch = pickle.loads(queue.get())
            waited += time.monotonic() - before
            loss, norm = self.step(batch)
            mean += loss / LOG_STEPS
            pictures += len(batch[0].patches) * self.workers
            now = time.monotonic()
            self.elapsed, last = self.elapsed + now - last, now
            progress.value = self.progress
            if self.batches % LOG_STEPS == 0:
                spent = now - window
                speed = (
                    f"s/step {spent / LOG_STEPS:.2f} wait {waited / spent:.2f} items/s {pictures / spent:.0f}"
                )
                head = f"step {self.batches} min {self.elapsed / 60:.1f} loss {mean:.4f} norm {norm:.2f}"
                self.log("train.log", f"{head} {speed} grid {batch[0].grid} rate {self.scale():.3f}")
                mean, waited, pictures, window = 0.0, 0.0, 0, now
            if self.elapsed - saved > SAVE_SECONDS:
                self.save()
                saved = self.elapsed
            if self.elapsed - evaluated > EVAL_SECONDS:
                self.evaluate(test)
                evaluated = self.elapsed


def export(folder: Path, dest: Path) -> None:
    """Write the run's averaged weights as the transformers folder ``dest``."""
    state = torch.load(folder / "state.pt", weights_only=False)
    checkpoint.write(
        dest, speaking(state["optimizer"]["average"]), Tokenizer.from_file(str(folder / "tokenizer.json"))
    )
    print(f"{dest}: step {state['optimizer']['steps']}, {state['elapsed'] / 60:.1f} minutes of training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="run folder")
    parser.add_argument("--minutes", type=float, default=90.0, help="training time, resumed parts included")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--workers", type=int, default=2, help="processes that compute gradients")
    parser.add_argument("--rate", type=float, default=0.4, help="factor on both learning rates")
    parser.add_argument("--resume", action="store_true", help="go on from the run folder's state")
    parser.add_argument("--start", type=Path, metavar="DIR", help="a model folder to start from")
    parser.add_argument("--trained", type=float, default=0.0, help="minutes that the weights of --start took")
    parser.add_argument("--export", type=Path, nargs="+", metavar="DIR", help="run folder and destination")
    options = parser.parse_args()
    if options.export:
        export(options.export[0], options.export[1] if len(options.export) > 1 else checkpoint.FOLDER)
        return
    if options.out is None:
        parser.error("--out RUN or --export RUN is needed")
    torch.set_num_threads(1)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # stop means save, then end
    Run(options).train()


if __name__ == "__main__":
    main()
