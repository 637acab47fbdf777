"""`megarl eval`: models side by side on held-out prompts."""

import argparse
import os
from collections.abc import Callable

from megarl.data.columns import USUAL_NAMES
from megarl.evaluation.models import DTYPES
from megarl.evaluation.settings import read_options
from megarl.machine import resolve_device


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("overrides", nargs="*", metavar="[CONFIG] key.path=value", help="YAML file; its keys anew")
    parser.add_argument(
        "--model",
        action="append",
        dest="models",
        metavar="[NAME=]PATH",
        help="Hugging Face folder, checkpoint or run directory; several are compared; default: the run of CONFIG",
    )
    parser.add_argument("--data", metavar="FILE", help="JSONL or Parquet file; default: data.validation")
    parser.add_argument("--reward", metavar="NAME", help="see megarl.rewards; default: algorithm.reward")
    for what in ("prompt", "answer"):
        usual = ", ".join(USUAL_NAMES[what])
        text = f"default: data.{what}_key, or without CONFIG the first there is of {usual}"
        parser.add_argument(f"--{what}-key", metavar="COLUMN", help=text)
    parser.add_argument("--samples-per-prompt", type=int, metavar="N", help="default: evaluation.samples_per_prompt, 1")
    parser.add_argument("--temperature", type=float, metavar="T", help="default: evaluation.temperature, 0 (greedy)")
    parser.add_argument("--pass-at", type=numbers, metavar="K,K", help="of pass@k and maj@k; default: 1")
    parser.add_argument("--max-new-tokens", type=int, metavar="N", help="default: rollout.sampling.max_new_tokens")
    parser.add_argument("--max-prompts", type=int, metavar="N", help="only the first of the data; default: all")
    parser.add_argument("--dtype", choices=DTYPES, help="default: model.dtype, or without CONFIG the model's own")
    parser.add_argument("--seed", type=int, metavar="S", help="of sampling and of the confidence intervals")
    parser.add_argument("--out", metavar="FOLDER", help="default: a new one in eval/ of run_directory")


def numbers(text: str) -> list[int]:
    try:
        return [int(number) for number in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"wanted whole numbers with commas between them, given {text!r}") from None


def run(options: argparse.Namespace, print_line: Callable[[str], None] = print) -> int:
    """Evaluate, and write and print the report. Raises ConfigError for wrong input before anything is started, RunError
    where a model cannot be served, and after the report where rewards failed."""
    configs, out = read_options(options)
    if resolve_device(next(iter(configs.values()))) == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as for training
    from megarl.evaluation.evaluate import evaluate

    evaluate(configs, options.max_prompts, out, print_line)
    return 0
