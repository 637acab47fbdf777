"""The command line: parse, call, exit code. 0: done, 1: the run failed or data are bad, 2: the input is wrong, 130:
interrupted."""

import argparse
import os
import signal
import sys
from collections.abc import Callable

import megarl
from megarl import data_report
from megarl.cluster import check_settings
from megarl.config import describe, load
from megarl.config_checks import refuse_used_run
from megarl.errors import ConfigError, RunError
from megarl.evaluation import run as evaluation
from megarl.machine import resolve_device


def main(arguments: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    if options.command == "train":
        return exit_code(lambda: train(options, ["megarl", *arguments]))
    return exit_code(lambda: COMMANDS[options.command](options))


def exit_code(command: Callable[[], int]) -> int:
    """What the command returns; where it raises, the code that stands for that, with the reason on stderr."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: what was begun is taken away
    try:
        return command()
    except ConfigError as error:
        return fail(error, 2)
    except RunError as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        return fail("interrupted", 130)


def parse(arguments: list[str]) -> argparse.Namespace:
    """Exits with 2 and the usage where the arguments make no sense."""
    parser = argparse.ArgumentParser(prog="megarl", description=megarl.__doc__, allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"megarl {megarl.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    train_parser = commands.add_parser("train", help="train a model", allow_abbrev=False)
    train_parser.add_argument("config", help="YAML file, see configs/")
    train_parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a key of the file")
    train_parser.add_argument(
        "--resume",
        default="never",
        metavar="auto|PATH|never",
        help="go on from the newest complete checkpoint of the run, or from the one in PATH; default: never",
    )
    train_parser.add_argument(
        "--allow-config-change", action="store_true", help="resume with a config that trains otherwise"
    )
    train_parser.add_argument("--dry-run", action="store_true", help="check and print the config and what it needs")
    train_parser.add_argument(
        "--seeds", metavar="K,K", help="a run for each seed in turn, NAME-seedK, and their spread"
    )
    add_ray_address(train_parser)
    data_parser = commands.add_parser("data", help="a quality report on data; conversion", allow_abbrev=False)
    data_report.add_arguments(data_parser)
    reward_parser = commands.add_parser("reward", help="try a config's rewards without training", allow_abbrev=False)
    reward_parser.add_argument("config", help="YAML file, see configs/")
    reward_parser.add_argument("overrides", nargs="*", metavar="key.path=value", help="override a key of the file")
    add_ray_address(reward_parser)
    source = reward_parser.add_mutually_exclusive_group()
    source.add_argument("--samples", metavar="FILE", help="score a run's samples.jsonl, or rows with responses")
    source.add_argument(
        "--from-model", type=int, metavar="N", help="have model.path answer N prompts; default: those of a step"
    )
    eval_parser = commands.add_parser("eval", help="answers of models to held-out prompts, counted", allow_abbrev=False)
    evaluation.add_arguments(eval_parser)
    add_ray_address(eval_parser)
    plot_parser = commands.add_parser("plot", help="a picture of runs' curves", allow_abbrev=False)
    plot_parser.add_argument("runs", nargs="+", metavar="RUN", help="run directory; seeds of one name are one curve")
    plot_parser.add_argument("--out", default="curves.png", metavar="FILE", help="png, svg or pdf; default: curves.png")
    plot_parser.add_argument("--smooth", type=int, default=1, metavar="N", help="draw means of N steps; default: 1")
    plot_parser.add_argument("--title", help="default: the run's name, where it is one")
    text = "whether this machine, or a Ray cluster, is fit for a run"
    check_settings.add_arguments(commands.add_parser("check", help=text, allow_abbrev=False))
    clean_parser = commands.add_parser("clean", help="remove what dead runs have left", allow_abbrev=False)
    clean_parser.add_argument("run_ids", nargs="*", metavar="RUN_ID", help="only these, see runs/NAME/env.json")
    clean_parser.add_argument("--ray-address", metavar="ADDRESS", help="of a Ray cluster to clean as well")
    clean_parser.add_argument("--dry-run", action="store_true", help="print what would be removed")
    options, rest = parser.parse_known_args(arguments)
    # argparse ends a list of positionals at the first option: overrides after --dry-run are in the rest.
    unknown = [argument for argument in rest if argument.startswith("-")]
    if unknown:
        commands.choices[options.command].error(f"unknown option: {' '.join(unknown)}")
    getattr(options, {"clean": "run_ids", "plot": "runs"}.get(options.command, "overrides")).extend(rest)
    if options.command != "clean" and getattr(options, "ray_address", None):
        options.overrides.append(f"cluster.ray_address={options.ray_address}")
    return options


def add_ray_address(parser: argparse.ArgumentParser) -> None:
    text = "of a running Ray cluster, or auto for this node's: cluster.ray_address of the config"
    parser.add_argument("--ray-address", metavar="HOST:PORT|auto", help=text)


def train(options: argparse.Namespace, command: list[str]) -> int:
    if options.seeds is not None:
        from megarl import many_seeds

        return many_seeds.train(options, command[1:])
    config = load(options.config, options.overrides, to_run=not options.dry_run)
    checkpoint = None
    if resolve_device(config) == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # before torch is loaded, here and in every child
    if options.resume == "never":
        refuse_used_run(config)
    else:
        from megarl.checkpoint import resume

        checkpoint = resume.find(config, options.resume, options.allow_config_change, print)
    if options.dry_run:
        print(describe(config), end="")
        return 0
    if checkpoint and (why := checkpoint.why_done(config)):
        print(f"megarl: nothing is left to do: {why}; the checkpoint is {checkpoint.folder}")
        return 0
    from megarl import trainer

    trainer.train(config, command, checkpoint)
    return 0


def reward(options: argparse.Namespace) -> int:
    if options.from_model is not None and options.from_model < 1:
        raise ConfigError(f"--from-model {options.from_model}: wanted 1 or more prompts")
    config = load(options.config, options.overrides)
    if resolve_device(config) == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as for training
    from megarl import score_samples

    score_samples.run(config, options.samples, options.from_model, print)
    return 0


def check(options: argparse.Namespace) -> int:
    config, device, of_run = check_settings.read_options(options)
    if device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # as for training
    from megarl.cluster.check import check

    return check(config, device, of_run, options.timeout, print)


def plot(options: argparse.Namespace) -> int:
    from megarl import plot

    return plot.run(options.runs, options.out, options.smooth, options.title)


def clean(options: argparse.Namespace) -> int:
    from megarl.cluster.clean import clean

    clean(options.run_ids, options.ray_address, options.dry_run, print)
    return 0


COMMANDS = {
    "check": check,
    "clean": clean,
    "data": data_report.run,
    "eval": evaluation.run,
    "plot": plot,
    "reward": reward,
}


def fail(message: object, code: int) -> int:
    print(f"megarl: error: {message}", file=sys.stderr)
    return code
