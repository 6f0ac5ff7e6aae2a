"""Sleep, wake, sync, offload and train on one GPU, several times over: device memory and greedy samples, as JSON."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
from in_session import run_in_session  # noqa: E402

NUM_CYCLES = 3


def body(session, out: Path) -> list[dict]:
    return [cycle(session, step) for step in range(NUM_CYCLES)]


def cycle(session, step: int) -> dict:
    import numpy as np
    import torch

    from megagrpo import train
    from megagrpo.mcore.offload import gradient_storages, optimizer_storages, parameter_storages
    from megagrpo.rollouts import gather_samples
    from megagrpo.weight_sync import sync_weights, verify_weights

    def num_bytes(tensors: list) -> int:
        return sum(tensor.untyped_storage().size() for tensor in tensors)

    actor, engine = session.actor, session.engine
    prompts = session.prompts.prompts_for_step(0)
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
    asleep, total = torch.cuda.mem_get_info()
    actor.restore()
    metrics = train.update_policy(session, train.batches(session, samples, np.zeros(len(samples))), step=step)
    return {
        "held": held,
        "freed_state": freed_state,
        "freed_weights": freed_weights,
        "freed_by_sleep": asleep - awake,
        "used_while_all_rest": total - asleep,
        "num_verified": num_verified,
        "restored": torch.cuda.memory_allocated(),
        "tokens": [sample.response_ids.tolist() for sample in samples],
        "prob_diff": metrics["mismatch/prob_diff_mean"],
    }


if __name__ == "__main__":
    run_in_session(body)
