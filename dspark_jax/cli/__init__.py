"""The command line `dspark`: a thin face over the library, one file a command.

Results go to stdout, everything else (progress, warnings, errors) to stderr. Exit codes: 0 for success, 1 where a check
found a difference, 2 for input that cannot be used.
"""

import io
import logging
import os
import sys
from collections.abc import Sequence

import jax
import tyro
from tyro.extras import SubcommandApp

from dspark_jax.cli import (
    bench,
    convert,
    crosscheck,
    data,
    describe,
    evaluate,
    export,
    generate,
    inspect,
    train,
    verify,
)
from dspark_jax.cli.terminal import one_line_warnings, print_error, termination_interrupts
from dspark_jax.errors import DsparkError

DESCRIPTION = """\
DeepSeek-V4 and its DSpark drafter in JAX: lossless speculative decoding in one jitted loop.

Results go to stdout, progress and errors to stderr. Exit codes: 0 success, 1 a check failed, 2 unusable input.

Examples:
  dspark generate "Once upon a time" --checkpoint DeepSeek-V4-Flash-0731
  dspark generate --prompt-ids 1,2,3 --checkpoint tests/golden/tiny-a --json
  dspark evaluate --checkpoint DeepSeek-V4-Flash-0731 --prompts prompts.jsonl --out evaluation
  dspark inspect --checkpoint DeepSeek-V4-Flash-0731
  dspark crosscheck compare --checkpoint tests/golden/tiny-a --record tests/golden/tiny-a/expected.safetensors
  dspark bench load --synthetic-gb 4
  dspark data regenerate --checkpoint DeepSeek-V4-Flash-0731 --prompts prompts.jsonl --out data.jsonl
  dspark train --checkpoint DeepSeek-V4-Flash-0731 --documents data.jsonl --out run
  dspark export --checkpoint DeepSeek-V4-Flash-0731 --run run --out tuned
  dspark convert drafter.gguf --to llama.cpp-bf16 --checkpoint DeepSeek-V4-Flash-0731
  dspark verify DeepSeek-V4-Flash-0731 drafter.gguf
  dspark generate --help"""

CROSSCHECK_DESCRIPTION = "Check this package's numbers against PyTorch's: `crosscheck compare`."

BENCH_DESCRIPTION = (
    "Measure this machine: `bench load`, `bench generate`, `bench bandwidth`, `bench convert`, `bench kernel`."
)

DATA_DESCRIPTION = "Data to train a drafter on: `data regenerate`, `data cache`, `data describe`."


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Args:
        argv: arguments without the program's name; None for those of the process.

    Raises:
        SystemExit: after `--help` (code 0), and for options that do not exist or do not parse (code 2).
    """
    arguments = sys.argv[1:] if argv is None else list(argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that knows no ✓ gets its number
    logging.basicConfig(format="dspark: warning: %(message)s", level=logging.WARNING)
    with one_line_warnings(), termination_interrupts():
        try:
            code = _app().cli(
                prog="dspark",
                description=DESCRIPTION,
                args=arguments,
                config=(tyro.conf.FlagCreatePairsOff, tyro.conf.HelptextFromCommentsOff),
            )
            sys.stdout.flush()
            return code
        except DsparkError as error:
            print_error(str(error))
            return 2
        except (MemoryError, jax.errors.JaxRuntimeError) as error:
            print_error(f"memory or device gave up ({short_reason(error)}); use a shorter context or more devices.")
            return 2
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the last flush stays quiet, too
            return 141
        except OSError as error:
            print_error(f"output cannot be written ({error.strerror or error}).")
            return 2
        except KeyboardInterrupt:
            print_error("interrupted.")
            return 130


def short_reason(error: BaseException) -> str:
    """The first line of what was said, or the kind of error where nothing was."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _app() -> SubcommandApp:
    app, crosschecks, benches, datas = SubcommandApp(), SubcommandApp(), SubcommandApp(), SubcommandApp()
    app.command(generate.generate)
    app.command(evaluate.evaluate)
    app.command(inspect.inspect)
    crosschecks.command(crosscheck.compare)
    app.command(crosschecks, name="crosscheck", help=CROSSCHECK_DESCRIPTION)
    benches.command(bench.load)
    benches.command(bench.generate)
    benches.command(bench.bandwidth)
    benches.command(bench.convert)
    benches.command(bench.kernel)
    app.command(benches, name="bench", help=BENCH_DESCRIPTION)
    datas.command(data.regenerate)
    datas.command(data.cache)
    datas.command(describe.describe)
    app.command(datas, name="data", help=DATA_DESCRIPTION)
    app.command(train.train)
    app.command(export.export)
    app.command(convert.convert)
    app.command(verify.verify)
    return app
