"""Plants faults in the weight sync of the real stack and writes what verify_weights says of each as JSON.

fault_worker.py OUT_DIR [section.key=value ...]
"""

import json
import os
import sys
from pathlib import Path


class Tampered:
    """A weight stream whose tensors were changed on the way."""

    def __init__(self, stream, change):
        self._stream, self._change = stream, change

    def buckets(self, bucket_bytes):
        for bucket in self._stream.buckets(bucket_bytes):
            yield [(name, self._change(name, tensor)) for name, tensor in bucket]


def main(out: Path, arguments: list[str]) -> None:
    from megagrpo.config.loader import load_config
    from megagrpo.observability.logs import RankLogs

    config = load_config([*arguments, f"trainer.runs_dir={out}", "trainer.name=run"], world_size=int(os.environ["WORLD_SIZE"]))
    logs = RankLogs(rank=int(os.environ["RANK"]))
    from megagrpo.environment import prepare_environment

    prepare_environment(config)
    import torch

    from megagrpo.engine_weights import EngineWeights
    from megagrpo.session import join, start
    from megagrpo.weight_sync import WeightMismatchError, sync_weights, verify_weights

    try:
        with start(config, logs, join(config, logs)) as session:
            engine, stream = session.engine, session.actor.stream
            originals = {name: tensor.clone() for bucket in stream.buckets(2**20) for name, tensor in bucket}
            down = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]
            moe = "model.layers.1.mlp.experts.2.down_proj.weight"
            changes = {
                "none": lambda name, tensor: tensor,
                "swapped": lambda name, tensor: originals[down[1 - down.index(name)]] if name in down else tensor,
                "stale_projection": lambda name, t: t + 1e-3 if name == "model.layers.2.self_attn.k_proj.weight" else t,
                "one_element": lambda name, t: (
                    torch.where(torch.arange(t.numel()) == 5, t + 1e-3, t) if name == "model.layers.3.input_layernorm.weight" else t
                ),
                "stale_expert": lambda name, t: t * 1.01 if name == moe else t,
                "embedding": lambda name, t: t * 1.01 if name == "model.embed_tokens.weight" else t,
            }
            report = {}
            for fault, change in changes.items():
                engine.wake_for_sync()
                sync_weights(Tampered(stream, change), engine, bucket_bytes=2**20)
                try:
                    report[fault] = verify_weights(stream, engine, bucket_bytes=2**20)
                except WeightMismatchError as error:
                    report[fault] = str(error)
                engine.sleep()

            EngineWeights.repack_tied_head = lambda self: None  # as if the packed copy of a tied head had been forgotten
            sync_weights_before = Tampered(stream, changes["embedding"])
            for source in (sync_weights_before, stream):
                engine.wake_for_sync()
                sync_weights(source, engine, bucket_bytes=2**20)
                engine.sleep()
            try:
                report["stale_tied_head"] = verify_weights(stream, engine, bucket_bytes=2**20)
            except WeightMismatchError as error:
                report["stale_tied_head"] = str(error)
            if session.parallel.rank == 0:
                (out / "report.json").write_text(json.dumps(report))
    except BaseException as error:
        logs.report_failure(error, phase="worker")
        os._exit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
