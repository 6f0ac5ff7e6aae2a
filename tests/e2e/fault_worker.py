"""Plants faults in the weight sync of the real stack: what verify_weights says of each, as JSON."""

from pathlib import Path

from in_session import run_in_session


class Tampered:
    """A weight stream whose tensors were changed, or dropped (None), on the way."""

    def __init__(self, stream, change):
        self._stream, self._change = stream, change

    def buckets(self, bucket_bytes):
        for bucket in self._stream.buckets(bucket_bytes):
            changed = [(name, self._change(name, tensor)) for name, tensor in bucket]
            yield [(name, tensor) for name, tensor in changed if tensor is not None]


def changes(originals) -> dict:
    """Fault -> (name, tensor) -> what arrives in its place."""
    down = [f"model.layers.{layer}.mlp.down_proj.weight" for layer in (0, 1)]

    def added_to_one_element(tensor):
        changed = tensor.clone()
        changed[5] += 1e-3
        return changed

    def only(wanted, change):
        return lambda name, tensor: change(tensor) if name == wanted else tensor

    return {
        "none": lambda name, tensor: tensor,
        "swapped": lambda name, tensor: originals[down[1 - down.index(name)]] if name in down else tensor,
        "stale_projection": only("model.layers.2.self_attn.k_proj.weight", lambda tensor: tensor + 1e-3),
        "one_element": only("model.layers.3.input_layernorm.weight", added_to_one_element),
        "stale_expert": only("model.layers.1.mlp.experts.2.down_proj.weight", lambda tensor: tensor * 1.01),
        "embedding": only("model.embed_tokens.weight", lambda tensor: tensor * 1.01),
    }


def body(session, out: Path) -> dict:
    from megagrpo.engine_weights import EngineWeights
    from megagrpo.weight_sync import WeightMismatchError, sync_weights, verify_weights

    engine, stream = session.engine, session.actor.stream
    originals = {name: tensor.clone() for bucket in stream.buckets(2**20) for name, tensor in bucket}

    def synced(source) -> int | str:
        """The number of tensors compared after a sync from this source, or what is wrong."""
        engine.wake_for_sync()
        sync_weights(source, engine, bucket_bytes=2**20)
        try:
            return verify_weights(stream, engine, bucket_bytes=2**20)
        except WeightMismatchError as error:
            return str(error)
        finally:
            engine.sleep()

    faults = changes(originals)
    report = {fault: synced(Tampered(stream, change)) for fault, change in faults.items()}
    EngineWeights.repack_tied_head = lambda self: None  # as if the packed copy of a tied head had been forgotten
    synced(Tampered(stream, faults["embedding"]))
    report["stale_tied_head"] = synced(stream)

    lost = ("model.layers.2.self_attn.v_proj.weight", "model.layers.2.mlp.experts.1.up_proj.weight")
    incomplete = Tampered(stream, lambda name, tensor: None if name in lost else tensor)
    try:  # what a mapping without a row would do: the tensor is neither sent nor expected
        report["never_sent"] = verify_weights(incomplete, engine, bucket_bytes=2**20)
    except WeightMismatchError as error:
        report["never_sent"] = str(error)
    return report


if __name__ == "__main__":
    run_in_session(body)
