"""The training run: prompts -> rollouts -> rewards -> advantages -> batches -> logprobs -> loss -> optimizer -> weight sync.

One program on every rank. `train` is the algorithm, one call per arrow; session.py builds what it uses.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
import torch.distributed as dist

from megagrpo.actor import MicroBatchSums
from megagrpo.advantages import estimate_advantages
from megagrpo.batching import make_mini_batches
from megagrpo.config.schema import Config
from megagrpo.evaluation import evaluate
from megagrpo.hf_mapping.folder import write_folder
from megagrpo.loss import step_metrics
from megagrpo.observability.logs import RankLogs
from megagrpo.observability.metrics import sample_metrics, speed_metrics
from megagrpo.observability.report import plot_curve, summarise
from megagrpo.observability.rollout_log import rollout_rows, write_rollouts
from megagrpo.optimizer import StepResult
from megagrpo.scoring import decode, score_and_gather
from megagrpo.session import Place, Session, join, start
from megagrpo.types import MicroBatch, Prompt, Sample
from megagrpo.weight_sync import sync_weights, verify_weights

_NUM_SAMPLES_SHOWN = 3


def run(config: Config, logs: RankLogs) -> None:
    """Train as configured, and show and save what came of it. A failure is reported once, then this process ends with status 1."""
    place: Place | None = None
    try:
        place = join(config, logs)
        with start(config, logs, place) as session:
            train(session)
            finish(session)
    except BaseException as error:
        board = place.board if place else None
        where, lost = (board.current, board.lost(patience_s=2.0)) if board else ("joining the other ranks", [])
        logs.report_failure(error, phase=where, lost=lost)
        os._exit(1)  # at once: other threads may wait for ranks that are gone, and torchrun ends the rest


def train(session: Session) -> None:
    """All steps of the run. Collective over all ranks."""
    config, engine = session.config, session.engine
    per_step = config.rollout.num_prompts_per_step * config.rollout.num_samples_per_prompt
    to_rollout(session, step=0)
    before = held_out_accuracy(session, step=0) if config.evaluation.at_start_and_end else {}
    if before and session.trackers:
        session.trackers.log(0, before)
    session.timer.finish_step()  # starting up was no step

    for step in range(1, config.trainer.total_steps + 1):
        prompts = session.prompts.prompts_for_step(step - 1)
        with phase(session, "gen", step):
            samples = engine.generate(
                prompts,
                num_samples_per_prompt=config.rollout.num_samples_per_prompt,
                temperature=config.rollout.temperature,
                step=step,
            )
        with phase(session, "reward", step):
            samples, tally = score_and_gather(
                samples, prompts, scorer=session.scorer, tokenizer=session.tokenizer, config=config, num_expected=per_step
            )
        with phase(session, "adv", step):
            advantages = estimate_advantages(samples, config.algorithm)
            mini_batches = batches(session, samples, advantages)
        to_training(session, step)
        metrics = update_policy(session, mini_batches, step)
        to_rollout(session, step)
        with phase(session, "logging", step):
            metrics |= sample_metrics(samples, advantages) | tally.metrics()
            log_rollouts(session, step, prompts, samples, advantages)
        last = step == config.trainer.total_steps
        if is_due(step, config.evaluation.every_n_steps) or (last and config.evaluation.at_start_and_end):
            metrics |= held_out_accuracy(session, step)
        log_step(session, step, metrics, num_tokens=sum(len(s.prompt_ids) + len(s.response_ids) for s in samples))


def batches(session: Session, samples: list[Sample], advantages: np.ndarray) -> list[list[MicroBatch]]:
    """This rank's micro-batches for every optimizer step of one pass over the samples."""
    parallel = session.parallel
    return make_mini_batches(
        samples,
        advantages,
        session.config,
        dp_rank=parallel.dp_rank,
        dp_size=parallel.dp_size,
        device=parallel.device,
        pad_to_multiple_of=parallel.tp_size if session.config.actor.sequence_parallel else 1,
        multiple_of=parallel.pp_size if parallel.vpp_size > 1 else 1,
    )


def update_policy(session: Session, mini_batches: list[list[MicroBatch]], step: int) -> dict[str, float]:
    """The optimizer steps on the samples of one rollout: num_epochs passes over the mini-batches. Returns their metrics."""
    algorithm, actor = session.config.algorithm, session.actor
    strictly_on_policy = algorithm.num_epochs * len(mini_batches) == 1
    with phase(session, "ref", step):
        ref = [actor.reference_logprobs(micro_batches) for micro_batches in mini_batches]
    with phase(session, "old_log_prob", step):
        # with one update the policy that is updated is the one that sampled: the loss takes its own log-probabilities
        old = [None if strictly_on_policy else actor.logprobs(micro_batches) for micro_batches in mini_batches]
    results = []
    with phase(session, "update_actor", step):
        for _ in range(algorithm.num_epochs):
            for micro_batches, old_logprobs, ref_logprobs in zip(mini_batches, old, ref, strict=True):
                results.append(actor.update(micro_batches, old_logprobs=old_logprobs, ref_logprobs=ref_logprobs))
        return reduce_updates(session, results)


def to_rollout(session: Session, step: int) -> None:
    """From training to generation: free what only training needs, fill the engine with the new weights, then free the weights too."""
    actor, engine, settings = session.actor, session.engine, session.config.weight_sync
    with phase(session, "offload", step):
        actor.release_state()
    with phase(session, "wake", step):
        engine.wake_for_sync()
    with phase(session, "update_weights", step):
        sync_weights(actor.stream, engine, bucket_bytes=settings.bucket_bytes)
        if settings.verify == "always" or (settings.verify == "first" and step == 0):
            verify_weights(actor.stream, engine, bucket_bytes=settings.bucket_bytes)
    with phase(session, "offload", step):
        actor.release_weights()
    with phase(session, "wake", step):
        engine.wake_for_generation()


def to_training(session: Session, step: int) -> None:
    """From generation to training: the engine gives its memory back, the actor takes its own again."""
    with phase(session, "offload", step):
        session.engine.sleep()
        session.actor.restore()


def finish(session: Session) -> None:
    """Export the weights, draw the curve and print the summary."""
    config, run_dir = session.config, session.run_dir
    to_training(session, config.trainer.total_steps)
    if config.trainer.export_hf:
        with phase(session, "save_checkpoint", config.trainer.total_steps):
            write_folder(
                run_dir / "hf",
                session.actor.stream,
                source=session.model_dir,
                writer=session.parallel.rank == 0,
                bucket_bytes=config.weight_sync.bucket_bytes,
            )
    if session.parallel.rank == 0:
        next_steps = [
            "use your own data: --config configs/<recipe>.yaml data.train_files=FILE.jsonl 'reward.functions={math_answer: 1.0}'",
            f"draw the curve again: python -m megagrpo.observability.report {run_dir}",
        ]
        session.console.summary(summarise(run_dir), run_dir=run_dir, curve=plot_curve(run_dir), next_steps=next_steps)


def held_out_accuracy(session: Session, step: int) -> dict[str, float]:
    """Measure and show the accuracy on the held-out prompts, where there are any."""
    if not session.val_prompts:
        return {}
    with phase(session, "testing", step):
        metrics = evaluate(session, step)
    session.console.evaluation_line(step, metrics)
    return metrics


def log_rollouts(session: Session, step: int, prompts: list[Prompt], samples: list[Sample], advantages: np.ndarray) -> None:
    """Write the samples of the step and show a few, on rank 0, as often as the settings say."""
    logging = session.config.logging
    shown, written = is_due(step, logging.samples_every_n_steps), is_due(step, logging.rollouts_every_n_steps)
    if session.trackers is None or not (shown or written):
        return
    rows = rollout_rows(samples, step=step, prompts=prompts, responses=decode(session.tokenizer, samples), advantages=advantages)
    if written:
        write_rollouts(session.run_dir, rows)
    if shown:
        session.console.sample_table(rows[:: -(-len(rows) // _NUM_SAMPLES_SHOWN)])


def log_step(session: Session, step: int, metrics: dict[str, float], *, num_tokens: int) -> None:
    """Report the step; its time ends here."""
    metrics |= session.timer.finish_step()
    metrics |= speed_metrics(step_seconds=metrics["timing_s/step"], num_tokens=num_tokens, num_devices=session.parallel.world_size)
    if session.parallel.device.type == "cuda":
        metrics["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / 2**30
        metrics["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / 2**30
    if session.trackers:
        session.trackers.log(step, metrics)
        session.console.step_line(step, session.config.trainer.total_steps, metrics)


def reduce_updates(session: Session, results: list[tuple[StepResult, list[MicroBatchSums]]]) -> dict[str, float]:
    """Metrics of the optimizer steps of one rollout, skipped ones left out, on every rank. Collective over all ranks."""
    made = [(result, sums) for result, sums in results if not result.skipped]
    metrics = {"actor/lr": results[-1][0].lr, "actor/skipped_updates": float(len(results) - len(made))}
    if not made:
        return metrics
    mine = [each for _, sums in made for each in sums] if session.parallel.reports_loss else []
    everyone: list[list[MicroBatchSums]] = [[] for _ in range(session.parallel.world_size)]
    dist.all_gather_object(everyone, mine)
    metrics |= step_metrics([sums for part in everyone for sums in part], num_updates=len(made))
    metrics["actor/grad_norm"] = float(np.mean([result.grad_norm for result, _ in made]))
    return metrics


def is_due(step: int, every: int) -> bool:
    """Whether something done every so many steps (0: never) is done at this one."""
    return every > 0 and step % every == 0


@contextmanager
def phase(session: Session, name: str, step: int) -> Iterator[None]:
    """Time a phase, and let the other ranks know of it."""
    session.board.enter(name, step=step)
    with session.timer.phase(name):
        yield
