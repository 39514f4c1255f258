"""``mmserve bench latency``, ``throughput`` and ``encoder``: a model in this process, beside what the machine
can do at most. Every option of the model and the engine may be given, so that any two settings compare."""

import argparse
import logging
import sys
from typing import Any

from mmserve.commands.bench_options import add_json, count, count_or_none, counts, size, sizes
from mmserve.core.config import Config, add_arguments, from_arguments, options


def add(benches: Any) -> None:
    _add_latency(benches)
    _add_throughput(benches)
    _add_encoder(benches)


def _add_latency(benches: Any) -> None:
    parser = benches.add_parser(
        "latency", help="time to first token and a token, by batch size (engine alone)"
    )
    parser.add_argument("--batch", type=counts, default=(1, 8), metavar="N,N", help="requests at once (1,8)")
    _add_shape(parser)
    _add_common(parser, 3, "model", "cache", "scheduler", "runner")
    parser.set_defaults(run=_latency)


def _add_throughput(benches: Any) -> None:
    parser = benches.add_parser("throughput", help="requests and tokens a second, all requests at once")
    parser.add_argument("--requests", type=count, default=32, metavar="N", help="(default: 32)")
    _add_shape(parser)
    _add_common(parser, 3, "model", "media", "cache", "scheduler", "runner")
    parser.set_defaults(run=_throughput)


def _add_encoder(benches: Any) -> None:
    parser = benches.add_parser("encoder", help="vision tokens a second, by size of pictures and batch")
    parser.add_argument(
        "--sizes", type=sizes, default=((256, 256), (512, 512), (1024, 1024)), metavar="WxH,WxH"
    )
    parser.add_argument("--batch", type=counts, default=(1, 4), metavar="N,N", help="pictures at once (1,4)")
    _add_common(parser, 5, "model", "runner")
    parser.set_defaults(run=_encoder)


def _add_shape(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--text-tokens", type=count, default=32, metavar="N", help="of a prompt (default: 32)"
    )
    parser.add_argument(
        "--pictures", type=count_or_none, default=1, metavar="N", help="of a prompt (default: 1)"
    )
    parser.add_argument(
        "--size", type=size, default=(512, 512), metavar="WxH", help="of them (default: 512x512)"
    )
    parser.add_argument("--answer-tokens", type=count, default=64, metavar="N", help="(default: 64)")


def _add_common(parser: argparse.ArgumentParser, rounds: int, *sections: str) -> None:
    parser.add_argument(
        "--rounds", type=count, default=rounds, metavar="N", help=f"medians are over so many ({rounds})"
    )
    add_json(parser)
    add_arguments(parser, *sections)


# ---------------------------------------------------------------- runs


def _latency(args: argparse.Namespace) -> int:
    bench, rates = _loaded(args)
    from mmserve.bench import offline

    engine, shape = bench.engine(), _shape(args)
    rows = []
    for batch in args.batch:
        rows.append(offline.latency(bench, engine, shape, batch, args.rounds, rates))
        _tell(f"batch {batch}")
    return _report(args, "latency", rows, rates, bench.model.backends)


def _encoder(args: argparse.Namespace) -> int:
    bench, rates = _loaded(args)
    from mmserve.bench import encoder

    rows = []
    for shape in args.sizes:
        for batch in args.batch:
            rows.append(encoder.measure(bench.model, shape, batch, args.rounds, rates))
            _tell(f"{shape[0]}x{shape[1]}, batch {batch}")
    return _report(args, "encoder", rows, rates, bench.model.backends)


def _throughput(args: argparse.Namespace) -> int:
    quiet()
    import torch

    from mmserve.bench import roofline, throughput
    from mmserve.llm import LLM
    from mmserve.models.config import read_config
    from mmserve.models.hub import resolve

    config = from_arguments(args)
    if config.runner.threads:
        torch.set_num_threads(config.runner.threads)
    weights = config.model.load_format != "dummy"
    model = read_config(resolve(config.model.model, config.model.revision, weights=weights))
    dtype = _dtype(config, model.dtype)
    rates = roofline.measure(_device(config), dtype, config.model.quantization)
    with LLM(**given_options(args)) as llm:
        row = throughput.measure(llm, model, dtype, _shape(args), args.requests, args.rounds, rates)
    return _report(args, "throughput", [row], rates, {})


def _loaded(args: argparse.Namespace) -> tuple[Any, Any]:
    """The model, and the machine's rates in its dtype."""
    quiet()
    from mmserve.bench import roofline
    from mmserve.bench.offline import Bench

    bench = Bench(from_arguments(args))
    quantization = bench.config.model.quantization
    return bench, roofline.measure(bench.model.device, bench.model.dtype, quantization)


def _report(args: argparse.Namespace, name: str, rows: Any, rates: Any, backends: Any) -> int:
    from mmserve.bench.table import machine, markdown, write_json

    print(f"{machine()['cpu']}, {machine()['cores']} cores, {machine()['date']}; medians of {args.rounds};")
    print(f"{rates.told()}\n")
    print(markdown(rows))
    if args.json:
        report = {
            "bench": name,
            "options": given_options(args),
            "backends": backends,
            "roofline": rates.report(),
        }
        write_json(args.json, report | {"rows": rows})
    return 0


def _shape(args: argparse.Namespace) -> Any:
    from mmserve.bench.offline import Shape

    return Shape(args.text_tokens, args.pictures, args.size, args.answer_tokens)


def given_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of the configuration tree that were given."""
    known = {field.name for _, field in options()}
    return {name: value for name, value in vars(args).items() if name in known}


def _dtype(config: Config, checkpoint: str | None) -> Any:
    """What the model will run in: the checkpoint's own unless another is asked for, and never float16."""
    import torch

    name = checkpoint or "float32" if config.model.dtype == "auto" else config.model.dtype
    return torch.float32 if name == "float32" else torch.bfloat16


def _device(config: Config) -> Any:
    import torch

    cuda = config.model.device != "cpu" and torch.cuda.is_available()
    return torch.device("cuda" if cuda else "cpu")


def quiet() -> None:
    """Nothing but the table on the terminal."""
    from mmserve.commands import session

    session.quiet()
    logging.captureWarnings(True)


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)
