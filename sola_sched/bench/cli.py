"""Entry point: parses, prepares the environment, runs, and turns errors into one line."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from sola_sched.bench.args import build_parser
from sola_sched.bench.backends import environment
from sola_sched.bench.backends.model import write_model
from sola_sched.config.output_file import require_writable_folder
from sola_sched.errors import ConfigError, DatasetError, ProfileError, SloError

EXIT_USAGE = 2
EXIT_INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark from the command line; return the exit code.

    1 means that results were printed because they could not be saved; 2 that the arguments, the
    data set, the profile or the model cannot be used; 130 that the user stopped the run, after
    what had been measured was reported and saved.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if not arguments:
            environment.prepare(None, is_random=True)
            from sola_sched.bench.first_run import run as first_run

            return first_run.run()
        args = build_parser().parse_args(arguments)
        if args.make_model is not None:
            require_writable_folder(args.make_model.parent, "--make-model")
            print(f"Wrote {write_model(args.make_model)}; serve it with --load-format dummy.")
            return 0
        # A data set's tokenizer may have to be downloaded.
        needs_no_hub = args.model is None and (
            args.backend == "engine" or (args.backend == "sim" and args.tokenizer is None)
        )
        environment.prepare(args.model, is_random=needs_no_hub)
        from sola_sched.bench.runner import run

        return run(args)
    except (ConfigError, DatasetError, ProfileError, SloError) as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_USAGE
    except KeyboardInterrupt:
        print("Interrupted before the first measured run; nothing was saved.", file=sys.stderr)
        return EXIT_INTERRUPTED
