"""Sleep, wake, sync, offload and train on one GPU, several times over; writes device memory and greedy samples as JSON.

cycle_worker.py OUT_DIR [section.key=value ...]
"""

import json
import os
import sys
from pathlib import Path

NUM_CYCLES = 3


def main(out: Path, arguments: list[str]) -> None:
    from megagrpo.config.loader import load_config
    from megagrpo.observability.logs import RankLogs

    config = load_config([*arguments, f"trainer.runs_dir={out}", "trainer.name=run"])
    logs = RankLogs(rank=0)
    from megagrpo.environment import prepare_environment

    prepare_environment(config)
    import numpy as np
    import torch

    from megagrpo import train
    from megagrpo.mcore.offload import gradient_storages, optimizer_storages, parameter_storages
    from megagrpo.rollouts import gather_samples
    from megagrpo.session import join, start
    from megagrpo.weight_sync import sync_weights, verify_weights

    def num_bytes(tensors: list) -> int:
        return sum(tensor.untyped_storage().size() for tensor in tensors)

    try:
        with start(config, logs, join(config, logs)) as session:
            actor, engine = session.actor, session.engine
            prompts = session.prompts.prompts_for_step(0)
            report = []
            for cycle in range(NUM_CYCLES):
                held = {
                    "params": num_bytes(parameter_storages(actor.ddp)),
                    "grads": num_bytes(gradient_storages(actor.ddp)),
                    "optimizer": num_bytes(optimizer_storages(actor.optimizer, actor.ddp)),
                }
                before = torch.cuda.memory_allocated()
                actor.release_state()
                freed_state = before - torch.cuda.memory_allocated()
                engine.wake_for_sync()
                sync_weights(actor.stream, engine, bucket_bytes=2**28)
                num_verified = verify_weights(actor.stream, engine, bucket_bytes=2**28)
                with_weights = torch.cuda.memory_allocated()
                actor.release_weights()
                freed_weights = with_weights - torch.cuda.memory_allocated()
                engine.wake_for_generation()
                samples = gather_samples(engine.generate(prompts, num_samples_per_prompt=2, temperature=0.0, step=1), 2 * len(prompts))
                awake = torch.cuda.mem_get_info()[0]
                engine.sleep()
                asleep = torch.cuda.mem_get_info()[0]
                actor.restore()
                metrics = train.update_policy(session, train.batches(session, samples, np.zeros(len(samples))), step=cycle)
                report.append(
                    {
                        "held": held,
                        "freed_state": freed_state,
                        "freed_weights": freed_weights,
                        "freed_by_sleep": asleep - awake,
                        "num_verified": num_verified,
                        "restored": torch.cuda.memory_allocated(),
                        "tokens": [sample.response_ids.tolist() for sample in samples],
                        "grad_norm": metrics["actor/grad_norm"],
                        "prob_diff": metrics["mismatch/prob_diff_mean"],
                    }
                )
            (out / "report.json").write_text(json.dumps(report))
    except BaseException as error:
        logs.report_failure(error, phase="worker")
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
