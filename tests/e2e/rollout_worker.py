"""One session of the real stack: sync, sample, train a step, sync again, sample, export. Writes what was sampled as JSON.

rollout_worker.py OUT_DIR [section.key=value ...]
"""

import json
import os
import sys
from pathlib import Path

import numpy as np


def as_json(samples):
    return {
        sample.id: {
            "tokens": sample.response_ids.tolist(),
            "logprobs": None if sample.rollout_logprobs is None else sample.rollout_logprobs.tolist(),
        }
        for sample in samples
    }


def main(out: Path, arguments: list[str]) -> None:
    from megagrpo.config.loader import load_config
    from megagrpo.observability.logs import RankLogs

    config = load_config([*arguments, f"trainer.runs_dir={out}", "trainer.name=run"], world_size=int(os.environ["WORLD_SIZE"]))
    logs = RankLogs(rank=int(os.environ["RANK"]))
    from megagrpo.environment import prepare_environment

    prepare_environment(config)
    from megagrpo import train
    from megagrpo.hf_mapping.folder import write_folder
    from megagrpo.rollouts import gather_samples
    from megagrpo.session import join, start
    from megagrpo.weight_sync import sync_weights, verify_weights

    try:
        with start(config, logs, join(config, logs)) as session:
            engine, actor = session.engine, session.actor
            prompts = session.prompts.prompts_for_step(0)

            def sample(temperature: float, k: int, step: int) -> list:
                samples = engine.generate(prompts, num_samples_per_prompt=k, temperature=temperature, step=step)
                return gather_samples(samples, len(prompts) * k)

            report = {}
            train.to_rollout(session, step=0)
            report["num_verified"] = verify_weights(actor.stream, engine, bucket_bytes=2**20)
            drawn = sample(1.0, 3, step=1)
            report["sampled"] = as_json(drawn)
            train.to_training(session, step=1)
            report["metrics"] = train.update_policy(session, train.batches(session, drawn, np.linspace(-1, 1, len(drawn))), step=1)

            greedy = []
            for bucket_bytes in (1, 10_000, 2**30):  # one tensor at a time, a few, all at once
                engine.wake_for_sync()
                sync_weights(actor.stream, engine, bucket_bytes=bucket_bytes)
                verify_weights(actor.stream, engine, bucket_bytes=2**20)
                engine.wake_for_generation()
                greedy.append(as_json(sample(0.0, 1, step=2)))
                engine.sleep()
            report["greedy"] = greedy
            write_folder(out / "hf", actor.stream.buckets(2**20), source=session.model_dir, writer=session.parallel.rank == 0)
            if session.parallel.rank == 0:
                (out / "report.json").write_text(json.dumps(report))
    except BaseException as error:
        logs.report_failure(error, phase="worker")
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
