"""The command line of scripts/train_grpo.sh: help, mistakes and --dry-run are answered before torch is imported.

Arguments -> a checked Config, handed to megagrpo.train.run. Starts no other process: that is torchrun's work.
"""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import TextIO

from megagrpo.config.loader import ConfigError, dump_config, load_config
from megagrpo.config.reference import help_text
from megagrpo.preflight.checks import check_run
from megagrpo.preflight.layout import Layout

USAGE = """\
usage: torchrun --nproc_per_node N scripts/train_grpo.sh [--config FILE]... [section.key=value]...
       bash scripts/train_grpo.sh ...      starts torchrun itself: NPROC_PER_NODE, NNODES, NODE_RANK, MASTER_ADDR, MASTER_PORT,
                                           or RDZV_ENDPOINT and RDZV_ID, from the environment
       python scripts/train_grpo.sh ...    one process

Without --config the demo recipe runs. Later files and overrides win; values are YAML, key= is null.

  -h, --help     this text
  --dry-run      print the resolved configuration, the layout and what does not fit together; load nothing
  --check        say nothing unless something is wrong (bash runs this before torchrun)

Exit status: 0, or 2 for a mistake in the configuration.
"""

# Longer than the first process of a node takes to print and torchrun to notice its exit.
_SILENT_RANKS_WAIT_S = 15.0


def main(argv: list[str] | None = None) -> int:
    """Runs one process of a training run and returns its exit status; mistakes give one message on stderr and status 2."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        _print_once(f"{USAGE}\n{help_text()}")
        return 0
    flags = {"--dry-run", "--check"} & set(arguments)
    try:
        world_size, local_world_size = _process_counts()
        config = load_config([argument for argument in arguments if argument not in flags], world_size=world_size)
    except ValueError as error:
        return _refuse(str(error))
    problems = check_run(config, world_size=world_size, local_world_size=local_world_size)
    verdict = str(ConfigError(problems)) if problems else "Everything fits together."
    if "--dry-run" in flags:
        _print_once(f"{dump_config(config)}\n{Layout(config, world_size).table()}\n\n{verdict}")
        return 2 if problems else 0
    if problems:
        return _refuse(verdict)
    if "--check" in flags:
        return 0
    if "RANK" not in os.environ:
        if world_size > 1:
            return _refuse(f"WORLD_SIZE={world_size} but no RANK in the environment: start with torchrun or bash scripts/train_grpo.sh")
        _set_up_single_process()

    # torch, Megatron and vLLM are imported from here on: seconds, and not needed above
    from megagrpo.environment import prepare_environment
    from megagrpo.observability.logs import RankLogs

    logs = RankLogs(rank=int(os.environ["RANK"]))
    prepare_environment(config)
    from megagrpo.train import run

    run(config, logs)
    return 0


def _process_counts() -> tuple[int, int]:
    """World size and processes per node, as torchrun (or train_grpo.sh for its check) says; one process without it."""
    world_size = _count_from_environment("WORLD_SIZE", default=1)
    return world_size, _count_from_environment("LOCAL_WORLD_SIZE", default=world_size)


def _count_from_environment(name: str, *, default: int) -> int:
    text = os.environ.get(name, str(default))
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{name}={text} in the environment is not a number of processes; unset it or set a whole number")
    return int(text)


def _refuse(message: str) -> int:
    """Prints the mistake, which every rank finds, once per node; the first process to exit has torchrun end the others."""
    if not _is_first_of_node():
        time.sleep(_SILENT_RANKS_WAIT_S)
    _print_once(message, stream=sys.stderr)
    return 2


def _print_once(text: str, *, stream: TextIO = sys.stdout) -> None:
    if _is_first_of_node():
        stream.write(f"{text}\n")
        stream.flush()


def _is_first_of_node() -> bool:
    return os.environ.get("LOCAL_RANK", "0") == "0"


def _set_up_single_process() -> None:
    """Gives torch.distributed the environment of a world of one process, as torchrun would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
