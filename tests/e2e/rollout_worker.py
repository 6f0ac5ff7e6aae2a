"""Sync, sample, train a step, sync again in buckets of several sizes, sample, export: what was sampled, as JSON."""

from pathlib import Path

from in_session import run_in_session


def as_json(samples):
    return {
        sample.id: {
            "tokens": sample.response_ids.tolist(),
            "logprobs": None if sample.rollout_logprobs is None else sample.rollout_logprobs.tolist(),
        }
        for sample in samples
    }


def body(session, out: Path) -> dict:
    import numpy as np

    from megagrpo import train
    from megagrpo.hf_mapping.folder import write_folder
    from megagrpo.rollouts import gather_samples
    from megagrpo.weight_sync import sync_weights, verify_weights

    engine, stream = session.engine, session.actor.stream
    prompts = session.prompts.prompts_for_step(0)

    def sample(temperature: float, k: int, step: int) -> list:
        samples = engine.generate(prompts, num_samples_per_prompt=k, temperature=temperature, step=step)
        return gather_samples(samples, len(prompts) * k)

    train.to_rollout(session, step=0)
    num_verified = verify_weights(stream, engine, bucket_bytes=2**20)
    drawn = sample(1.0, 3, step=1)
    train.to_training(session, step=1)
    metrics = train.update_policy(session, train.batches(session, drawn, np.linspace(-1, 1, len(drawn))), step=1)

    # log-probabilities of a pass of their own, as with several updates per rollout, are those of the update's forward pass
    micro_batches = train.batches(session, drawn, np.ones(len(drawn)))[0]
    old = session.actor.logprobs(micro_batches)
    again = [session.actor.update(micro_batches, old_logprobs=old, ref_logprobs=None)]
    explicit_old = train.reduce_updates(session, again)

    greedy = []
    for bucket_bytes in (1, 10_000, 2**30):  # one tensor at a time, a few, all at once
        engine.wake_for_sync()
        sync_weights(stream, engine, bucket_bytes=bucket_bytes)
        verify_weights(stream, engine, bucket_bytes=2**20)
        engine.wake_for_generation()
        greedy.append(as_json(sample(0.0, 1, step=2)))
        engine.sleep()
    write_folder(out / "hf", stream, source=session.model_dir, writer=session.parallel.rank == 0, bucket_bytes=2**20)
    return {
        "num_verified": num_verified,
        "sampled": as_json(drawn),
        "metrics": metrics,
        "explicit_old": explicit_old,
        "greedy": greedy,
        "buckets": [([name for name, _ in bucket], sum(tensor.nbytes for _, tensor in bucket)) for bucket in stream.buckets(100_000)],
    }


if __name__ == "__main__":
    run_in_session(body)
