"""Everything a run needs, built in the one order that works, and ended in the reverse of it.

Configuration -> Session. Process group -> engine -> Megatron: vLLM checks free memory and profiles while it starts, so nothing else
may be on the device yet; and its shutdown, which destroys the default process group, comes last.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megagrpo.actor import Actor
from megagrpo.config.loader import dump_config
from megagrpo.config.paths import resolve_data_files, resolve_model_path
from megagrpo.config.schema import Config
from megagrpo.hf_mapping.families import mapping_for
from megagrpo.hf_mapping.folder import read_config
from megagrpo.lifecycle.peers import PhaseBoard, end_on_sigterm
from megagrpo.mcore.cpu import prepare_cpu
from megagrpo.mcore.parallel import Parallel, init_distributed, init_model_parallel
from megagrpo.mcore.transformer_config import resolve_fusions
from megagrpo.observability.console import RunConsole, phase_words
from megagrpo.observability.jsonl import LogWriteError, writing
from megagrpo.observability.logs import RankLogs, new_attempt
from megagrpo.observability.run_facts import run_facts
from megagrpo.observability.timers import StepTimer
from megagrpo.observability.trackers import Trackers
from megagrpo.prompts import PromptSampler, load_prompts
from megagrpo.rewards import Scorer
from megagrpo.rollouts import RolloutEngine, stop_token_ids
from megagrpo.types import Prompt

_SECONDS_BETWEEN_SIGNS_OF_LIFE = 10
_SILENT_RANKS_WAIT_S = 5.0


@dataclass(frozen=True, slots=True)
class Session:
    """The parts of a run on this rank."""

    config: Config
    run_dir: Path
    model_dir: Path
    parallel: Parallel
    tokenizer: Any
    prompts: PromptSampler
    val_prompts: list[Prompt]
    val_name: str
    engine: RolloutEngine
    actor: Actor
    scorer: Scorer
    timer: StepTimer
    console: RunConsole
    trackers: Trackers | None  # on rank 0
    board: PhaseBoard


@dataclass(frozen=True, slots=True)
class Place:
    """Where a run happens: this rank's device and the run's files, known before anything heavy is built."""

    device: torch.device
    run_dir: Path
    board: PhaseBoard


def join(config: Config, logs: RankLogs) -> Place:
    """Meet the other ranks, agree on the run's directory, and log into it. From here on a lost rank is noticed and named."""
    device = init_distributed(config)
    rank = dist.get_rank()
    run_dir, attempt_dir = _make_directories(config, rank)
    logs.open(attempt_dir)
    board = PhaseBoard(attempt_dir, rank=rank)
    end_on_sigterm(lambda: _report_sigterm(logs, board))
    return Place(device, run_dir, board)


@contextmanager
def start(config: Config, logs: RankLogs, place: Place) -> Iterator[Session]:
    """Build the session, and end it when the block is left without an exception."""
    device, run_dir, board = place.device, place.run_dir, place.board
    rank, world_size = dist.get_rank(), dist.get_world_size()
    console = RunConsole(logs.stdout, quiet=rank != 0)
    timer = StepTimer(synchronize=torch.cuda.synchronize if device.type == "cuda" else None)

    @contextmanager
    def stage(name: str) -> Iterator[None]:
        board.enter(name, step=0)
        with timer.phase(name):
            yield

    with console.watch(lambda: phase_words(timer.current), every_s=_SECONDS_BETWEEN_SIGNS_OF_LIFE):
        with stage("loading tokenizer and data"):
            model_dir = resolve_model_path(config.model.path)
            hf_config = read_config(model_dir)
            mapping = mapping_for(hf_config)
            tokenizer = _load_tokenizer(resolve_model_path(config.model.tokenizer_path or config.model.path))
            train = load_prompts(config.data.train_files, config, tokenizer, "train")
            val = load_prompts(config.data.val_files, config, tokenizer, "val") if config.data.val_files else []
            scorer = Scorer(config)
        with stage("starting vLLM"):
            stop_ids = stop_token_ids(tokenizer, _read_generation_config(model_dir))
            engine = RolloutEngine(model_dir, hf_config, config, device=device, stop_token_ids=stop_ids)
        with stage("building the Megatron model"):
            if device.type == "cpu":
                prepare_cpu()
            parallel = init_model_parallel(config, device)
            actor = Actor(hf_config, model_dir, mapping, config, parallel, total_updates=_total_updates(config))
        trackers = Trackers(run_dir, config) if rank == 0 else None
        console.start_panel(
            run_facts(
                config,
                world_size=world_size,
                num_parameters=actor.stream.num_parameters,
                device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU process",
                fusions=resolve_fusions(config.actor, device),
                run_dir=run_dir,
            )
        )
        yield Session(
            config=config,
            run_dir=run_dir,
            model_dir=model_dir,
            parallel=parallel,
            tokenizer=tokenizer,
            prompts=PromptSampler(
                train, num_prompts_per_step=config.rollout.num_prompts_per_step, seed=config.trainer.seed, shuffle=config.data.shuffle
            ),
            val_prompts=val[: config.evaluation.max_prompts],
            val_name=_dataset_name(config),
            engine=engine,
            actor=actor,
            scorer=scorer,
            timer=timer,
            console=console,
            trackers=trackers,
            board=board,
        )
    scorer.close()
    if trackers:
        trackers.close()
    dist.barrier()
    engine.shutdown()


def _make_directories(config: Config, rank: int) -> tuple[Path, Path]:
    """The run's directory and this start's log directory, made by rank 0, which names them for all."""
    made: list[Any] = [None]
    if rank == 0:
        model = Path(config.model.path).name
        run_dir = Path(config.trainer.runs_dir) / (config.trainer.name or f"{model}-{datetime.now():%Y%m%d-%H%M%S}")
        try:
            made = [_make_run_directory(run_dir, config)]
        except (LogWriteError, ValueError) as error:
            made = [error]  # for all ranks: the others would wait for the paths
    dist.broadcast_object_list(made)
    if isinstance(made[0], Exception):
        if rank == 0:
            raise made[0]
        time.sleep(_SILENT_RANKS_WAIT_S)  # torchrun ends all ranks when the first one exits: rank 0 shall have told why
        raise SystemExit(1)
    return made[0]


def _make_run_directory(run_dir: Path, config: Config) -> tuple[Path, Path]:
    if (run_dir / "metrics.jsonl").exists():
        raise ValueError(f"{run_dir} holds a run already; set another trainer.name, or remove it")
    with writing(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        (run_dir / "config.yaml").write_text(dump_config(config))
    return run_dir, new_attempt(run_dir)


def _report_sigterm(logs: RankLogs, board: PhaseBoard) -> None:
    lost = board.lost()  # torchrun ends the other ranks when one dies
    logs.report_first("\n".join(["error: a rank was lost", *lost]) if lost else f"ended by SIGTERM in {board.current}")


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _read_generation_config(folder: Path) -> dict[str, Any]:
    path = folder / "generation_config.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _total_updates(config: Config) -> int:
    return config.trainer.total_steps * config.algorithm.num_epochs * config.algorithm.num_mini_batches


def _dataset_name(config: Config) -> str:
    files = resolve_data_files(config.data.val_files, split="val")
    return "demo" if config.data.val_files == "demo" else "+".join(Path(file.partition(":")[2] or file).stem for file in files)
