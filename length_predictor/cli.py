"""Command line: build a predictor, ask it, compare predictors, look into a file."""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from sola_sched.config.output_file import require_writable, require_writable_folder
from sola_sched.errors import ConfigError, DatasetError, EncoderError, PredictorFileError
from sola_sched.length_predictor import corpus as corpora
from sola_sched.length_predictor.building import build_lexical, build_retrieval, encode_all
from sola_sched.length_predictor.corpus import Corpus
from sola_sched.length_predictor.evaluation import tables
from sola_sched.length_predictor.evaluation.evaluation import (
    NEEDS_ENCODER,
    PREDICTORS,
    TRAINS_ENCODER,
    evaluate,
    latency_ms,
    make,
)
from sola_sched.length_predictor.lexical.lexical_predictor import LexicalPredictor
from sola_sched.length_predictor.retrieval.embed import (
    DEFAULT_ENCODER,
    MAX_TOKENS,
    PRECISIONS,
    SentenceEncoder,
    parts_of,
)
from sola_sched.length_predictor.retrieval.index import DEFAULT_CAPACITY, use_one_thread
from sola_sched.length_predictor.retrieval.predictor import RetrievalPredictor
from sola_sched.length_predictor.storage import (
    load_lexical,
    load_retrieval,
    read_file,
    save_predictor,
)

_MIN_PROMPTS = 5
#: Seconds between two updates of a progress bar that goes to a file, one line each.
_LOG_INTERVAL_S = 10.0
_DATASETS = (
    "alpaca[:vicuna-7b], alpaca_eval[:MODEL], arena[:MODEL], sharegpt, or a file of JSON lines "
    "with 'prompt' and 'output_tokens' (or 'response_tokens', 'completion_tokens')"
)


def build_parser() -> argparse.ArgumentParser:
    """The command line's options."""
    parser = argparse.ArgumentParser(
        prog="python -m sola_sched.length_predictor",
        description="Predicts how many tokens a prompt's answer will have.",
    )
    commands = parser.add_subparsers(dest="command", required=True)

    build = commands.add_parser("build", help="make a predictor file from prompts with lengths")
    build.add_argument("dataset", nargs="+", help=f"{_DATASETS}; several are joined")
    build.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    build.add_argument(
        "--kind",
        choices=("lexical", "retrieval"),
        default="retrieval",
        help="retrieval holds a lexical predictor too (default: retrieval)",
    )
    build.add_argument(
        "--capacity",
        type=int,
        default=DEFAULT_CAPACITY,
        help=f"most past prompts kept (default: {DEFAULT_CAPACITY:,})",
    )
    _add_encoder(build)
    _add_data(build)

    predict = commands.add_parser("predict", help="predict prompts; one JSON object a line")
    predict.add_argument("file", type=Path, help="predictor file")
    predict.add_argument("prompt", nargs="*", help="prompts; none reads lines from standard input")
    _add_encoder(predict, is_of_file=True)

    check = commands.add_parser("eval", help="compare predictors on held-out prompts")
    check.add_argument("--train", default="alpaca:vicuna-7b", metavar="DATASET", help=_DATASETS)
    check.add_argument(
        "--test",
        nargs="+",
        default=None,
        metavar="DATASET",
        help="data sets to predict (default: the training one); a prompt's side of the split "
        "depends on its text alone",
    )
    check.add_argument(
        "--predictors",
        nargs="+",
        choices=PREDICTORS,
        default=[name for name in PREDICTORS if name not in TRAINS_ENCODER],
        help=f"(default: all but {' and '.join(sorted(TRAINS_ENCODER))}, which fine-tune the "
        "encoder for minutes)",
    )
    check.add_argument("--limit", type=int, help="use the first so many training prompts only")
    check.add_argument("--seed", type=int, default=0, help="of the requests learned live")
    check.add_argument(
        "--proxy-seconds", type=float, default=300.0, help="training time of proxy (default: 300)"
    )
    check.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this file")
    _add_encoder(check)
    _add_data(check)

    tune = commands.add_parser(
        "tune", help="fine-tune the sentence encoder to lengths; pass its folder to --encoder"
    )
    tune.add_argument("dataset", nargs="+", help=f"{_DATASETS}; several are joined")
    tune.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    tune.add_argument(
        "--seconds", type=float, default=450.0, help="training time at most (default: 450)"
    )
    tune.add_argument("--threads", type=int, default=1, help="(default: 1)")
    tune.add_argument("--encoder", default=DEFAULT_ENCODER, help="where it starts (%(default)s)")
    _add_data(tune)

    info = commands.add_parser("info", help="what a predictor file holds")
    info.add_argument("file", type=Path)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; return the exit status."""
    args = build_parser().parse_args(argv)
    use_one_thread()
    try:
        return _COMMANDS[args.command](args)
    except (ConfigError, DatasetError, EncoderError, PredictorFileError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _build(args: argparse.Namespace) -> int:
    if args.capacity < 1:
        raise ConfigError(f"'--capacity' must be >= 1 (got {args.capacity}).")
    require_writable(args.output, "--output")
    corpus = _joined([corpora.load(name, args.data) for name in args.dataset])
    start = time.monotonic()
    predictor: LexicalPredictor | RetrievalPredictor
    with _Bars() as bars:
        if args.kind == "lexical":
            predictor = build_lexical(corpus)
        else:
            predictor = build_retrieval(
                corpus, _encoder(args), capacity=args.capacity, report=bars.report
            )
    about = {"datasets": list(args.dataset), "num_prompts": len(corpus)}
    save_predictor(args.output, predictor, about)
    size = args.output.stat().st_size / 1e6
    print(
        f"{args.output}: {args.kind} predictor of {len(corpus):,} prompts, {size:.1f} MB, "
        f"{time.monotonic() - start:.0f} s"
    )
    return 0


def _predict(args: argparse.Namespace) -> int:
    header, _ = read_file(args.file)
    predictor = (
        load_lexical(args.file)
        if header.get("kind") == "lexical"
        else load_retrieval(args.file, _encoder(args, header.get("encoder")))
    )
    is_utf8 = (sys.stdout.encoding or "").lower().replace("-", "") == "utf8"
    for given in args.prompt or _lines(sys.stdin):
        # Bytes that are no UTF-8 arrive as halves of surrogate pairs, which are in no text.
        text = given.encode("utf-8", "replace").decode()
        answer = predictor.predict([text])[0]
        row = {
            "mean": round(answer.mean, 1),
            "median": round(answer.median, 1),
            "quantiles": [round(float(each), 1) for each in answer.quantiles],
            "source": answer.source,
            "prompt": text[:80],
        }
        print(json.dumps(row, ensure_ascii=not is_utf8), flush=True)
    return 0


def _lines(stream: TextIO) -> Iterator[str]:
    try:
        for line in stream:
            yield line.rstrip("\n")
    except UnicodeDecodeError as error:
        raise DatasetError(f"Standard input must be UTF-8 text ({error}).") from error


def _eval(args: argparse.Namespace) -> int:
    if args.limit is not None and args.limit < 1:
        raise ConfigError(f"'--limit' must be >= 1 (got {args.limit}).")
    if args.seed < 0:
        raise ConfigError(f"'--seed' must be >= 0 (got {args.seed}).")
    _require_seconds("--proxy-seconds", args.proxy_seconds)
    if args.json is not None:
        require_writable(args.json, "--json")
    train, _ = corpora.load(args.train, args.data).split()
    if args.limit is not None:
        train = train.take(np.arange(min(args.limit, len(train))))
    known = set(train.prompts)
    tests = [_held_out(name, args.data, known) for name in args.test or [args.train]]
    for part in (train, *tests):
        if len(part) < _MIN_PROMPTS:
            raise DatasetError(
                f"Training and test part must hold at least {_MIN_PROMPTS} prompts each (got "
                f"{len(part)} of {part.name}; one prompt in ten is held out)."
            )
    encoder = _encoder(args) if NEEDS_ENCODER & set(args.predictors) else None
    rows: list[dict[str, Any]] = []
    with _Bars() as bars:
        vectors = None
        if encoder is not None and set(args.predictors) & NEEDS_ENCODER - TRAINS_ENCODER:
            vectors = encode_all(encoder, train, bars.report)
        for name in args.predictors:
            start = time.monotonic()
            contender = make(
                name,
                train,
                encoder,
                vectors=vectors,
                proxy_seconds=args.proxy_seconds,
                report=bars.report,
            )
            seconds = time.monotonic() - start
            p50, p99 = latency_ms(contender.one, tests[0].prompts)
            for test in tests:
                for row in evaluate(name, contender, test, trained_on=args.train, seed=args.seed):
                    row |= {
                        "num_trained": len(train),
                        "train_s": seconds,
                        "latency_p50_ms": p50,
                        "latency_p99_ms": p99,
                        "num_bytes": contender.num_bytes,
                        "seed": args.seed,
                    }
                    rows.append(row)
    print(tables.markdown(rows))
    if args.json is not None:
        with args.json.open("a", encoding="utf-8") as stream:
            stream.writelines(json.dumps(row) + "\n" for row in rows)
    return 0


def _held_out(name: str, data: Path | None, known: set[str]) -> Corpus:
    """The test part of a data set; all of a small one, but for prompts that were trained on."""
    whole = corpora.load(name, data)
    if len(whole) > corpora.SMALL:
        return whole.split()[1]
    return whole.take(np.array([prompt not in known for prompt in whole.prompts]))


def _tune(args: argparse.Namespace) -> int:
    from sola_sched.length_predictor.evaluation.proxy import ProxyModel

    if args.threads < 1:
        raise ConfigError(f"'--threads' must be >= 1 (got {args.threads}).")
    _require_seconds("--seconds", args.seconds)
    require_writable_folder(args.output, "--output")
    corpus = _joined([corpora.load(name, args.data) for name in args.dataset])
    model = ProxyModel(args.encoder, num_threads=args.threads)
    with _Bars() as bars:
        done = model.fit(corpus, seconds=args.seconds, report=bars.report)
    model.save_encoder(args.output)
    print(
        f"{args.output}: encoder tuned on {len(corpus):,} prompts, {done['epochs']:.1f} epochs in "
        f"{done['seconds']:.0f} s"
    )
    return 0


def _require_seconds(option: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0.0):
        raise ConfigError(f"'{option}' must be a number of seconds > 0 (got {value:g}).")


def _info(args: argparse.Namespace) -> int:
    header, arrays = read_file(args.file)
    about = header.get("about", {})
    print(f"{args.file}: {header.get('kind')} predictor, {args.file.stat().st_size / 1e6:.1f} MB")
    sources = list(about.get("datasets", []))
    if about.get("num_live") or not sources:
        sources.append("live traffic")
    print(f"  built from   {', '.join(sources)}")
    print(f"  prompts      {about.get('num_prompts', 0):,}")
    learned = int(arrays["lexical/scalars"][2])
    print(f"  words model  {learned:,} requests learned")
    if "store/shape" in arrays:
        print(f"  encoder      {header.get('encoder')}")
        print(f"  decoder      {'yes' if 'decoder/mean' in arrays else 'no'}")
        capacity = int(arrays["store/shape"][0])
        print(f"  store        {len(arrays['store/keys']):,} of {capacity:,} entries")
        lengths = np.exp(arrays["store/values"][:, 0].astype(np.float64))
        if len(lengths):
            low, middle, high = np.quantile(lengths, [0.05, 0.5, 0.95])
            print(f"  lengths      median {middle:.0f}, 5 to 95 %: {low:.0f} to {high:.0f} tokens")
    return 0


_COMMANDS = {"build": _build, "predict": _predict, "eval": _eval, "tune": _tune, "info": _info}


def _add_encoder(parser: argparse.ArgumentParser, *, is_of_file: bool = False) -> None:
    group = parser.add_argument_group("encoder")
    group.add_argument(
        "--encoder", default=DEFAULT_ENCODER, help="name or folder (default: %(default)s)"
    )
    group.add_argument(
        "--precision",
        choices=PRECISIONS,
        help=f"(default: {'as the file' if is_of_file else PRECISIONS[0]})",
    )
    group.add_argument(
        "--max-prompt-tokens",
        type=int,
        help="tokens of a prompt that are read, half from each end "
        f"(default: {'as the file' if is_of_file else MAX_TOKENS})",
    )


def _add_data(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--data",
        type=Path,
        metavar="DIR",
        help=f"folder of the public data sets (default: ${corpora.DATA_VARIABLE}, or "
        "../shared/data)",
    )


def _encoder(args: argparse.Namespace, identity: Any = None) -> SentenceEncoder:
    """The encoder asked for; what is left open is as in the one of this identity."""
    _, precision, max_tokens = parts_of(identity)
    return SentenceEncoder(
        args.encoder,
        precision=args.precision or precision,
        max_tokens=max_tokens if args.max_prompt_tokens is None else args.max_prompt_tokens,
    )


def _joined(parts: Sequence[Corpus]) -> Corpus:
    return Corpus(
        " + ".join(part.name for part in parts),
        tuple(prompt for part in parts for prompt in part.prompts),
        np.concatenate([part.lengths for part in parts]),
    )


class _Bars:
    """A progress bar for each stage, on standard error; plain lines without tqdm."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._stage = ""

    def __enter__(self) -> _Bars:
        return self

    def __exit__(self, *exc: object) -> None:
        self._close()

    def report(self, stage: str, done: int, total: int) -> None:
        if stage != self._stage:
            self._close()
            self._stage = stage
            try:
                from tqdm import tqdm

                self._bar = tqdm(
                    total=total,
                    desc=stage,
                    file=sys.stderr,
                    dynamic_ncols=True,
                    mininterval=0.2 if sys.stderr.isatty() else _LOG_INTERVAL_S,
                )
            except ImportError:
                print(f"{stage} ...", file=sys.stderr)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def _close(self) -> None:
        if self._bar is not None:
            self._bar.close()
        self._bar, self._stage = None, ""
