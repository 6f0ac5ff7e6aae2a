"""Where a Hugging Face tensor lives in this rank's vLLM model, and whether the live layer really holds it.

vLLM fuses projections, slices layers over ranks and, on CPU, repacks linear and expert weights so that only what a layer computes
shows what it holds. The classes are recognised by their attributes: this file does not import vllm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

_PROBE_ROWS = 512  # of the identity matrix fed to a repacked linear layer at a time
_EXPERT_PROBE_TOKENS = 8


class EngineWeights:
    """One pass over a live vLLM model: every tensor is looked up once, and what was not looked up is known at the end."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._modules = dict(model.named_modules())
        self._packed = {part: (fused, parts) for fused, parts in model.packed_modules_mapping.items() for part in parts}
        self._visited: set[tuple[str, str, str]] = set()  # module, its tensor, and which part of a fused one
        self._experts: dict[str, dict[str, Tensor]] = {}  # expert name -> its tensors seen so far
        self._computed: tuple[str, Tensor] | None = None  # the repacked layer looked at last
        self.num_compared = 0

    def differences(self, name: str, expected: Tensor) -> list[str]:
        """[name] where the live layer holds something else than this rank's part of `expected`, else []."""
        path, leaf = name.rsplit(".", 1)
        parent, child = path.rsplit(".", 1) if "." in path else ("", path)
        if ".experts." in path:
            return self._expert_differences(name, expected)
        fused, parts = self._packed.get(child, (child, [child]))
        if f"{parent}.{fused}" not in self._modules:
            fused, parts = child, [child]
        module_name = f"{parent}.{fused}" if parent else fused
        module = self._modules[module_name]
        self._visited.add((module_name, leaf, child))
        self.num_compared += 1
        shard, rows = _local_part(module, expected, parts.index(child) if len(parts) > 1 else None)
        same = self._holds(self._weight(module_name, leaf)[rows], shard)
        if module_name == "model.embed_tokens" and self._tied_head_is_packed():
            same &= self._holds(self._weight("lm_head", "weight")[rows], shard)
        return [] if same else [name]

    def unvisited(self) -> list[str]:
        """Parameters of the engine that no call of `differences` has compared."""
        missing = []
        for module_name, module in self._modules.items():
            if module_name == "lm_head" and self._head_is_tied():
                continue  # compared along with the embedding
            for leaf, parameter in module._parameters.items():
                if parameter is not None:
                    wanted = self._parts_of(module_name, module)
                    missing += [f"{module_name}.{leaf} ({part})" for part in wanted if (module_name, leaf, part) not in self._visited]
        return missing

    def forget_packed_experts(self) -> None:
        """Make the next reload pack expert weights again: on CPU vLLM packs them once, when it first sets up their kernel."""
        for module in self._modules.values():
            if hasattr(module, "w13_weight") and module.w13_weight.device.type == "cpu":
                module.quant_method.moe_kernel = None

    def repack_tied_head(self) -> None:
        """Pack a tied head again from the embedding: on CPU it computes from a packed copy, which a reload leaves stale."""
        if self._tied_head_is_packed():
            head = self._modules["lm_head"]
            head.quant_method.process_weights_after_loading(head)

    def _head_is_tied(self) -> bool:
        """Whether there is a head of its own that shares the embedding's weight; some vLLM models use the embedding itself."""
        head, embedding = self._modules.get("lm_head"), self._modules["model.embed_tokens"]
        return head is not None and head.weight.data_ptr() == embedding.weight.data_ptr()

    def _tied_head_is_packed(self) -> bool:
        return self._head_is_tied() and hasattr(self._modules["lm_head"], "cpu_linear")

    def _parts_of(self, module_name: str, module: nn.Module) -> list[str]:
        """What a tensor of the module is made of: the projections of a fused one, the experts of this rank, else itself."""
        name = module_name.rsplit(".", 1)[-1]
        if hasattr(module, "w13_weight"):
            return [str(local) for local in range(module.local_num_experts)]
        return [part for part, (fused, _) in self._packed.items() if fused == name] or [name]

    def _weight(self, module_name: str, leaf: str) -> Tensor:
        """The whole local tensor, as stored or, where it was repacked, as computed; projections of one layer ask for it in a row."""
        module = self._modules[module_name]
        if leaf != "weight" or not hasattr(module, "cpu_linear"):
            return getattr(module, leaf)
        if self._computed is None or self._computed[0] != module_name:
            self._computed = module_name, _computed_weight(module)
        return self._computed[1]

    def _holds(self, held: Tensor, expected: Tensor) -> bool:
        """Whether both are equal in the precision of the engine, which may keep a small tensor in a higher one."""
        expected = expected.to(held.device, self._modules["model.norm"].weight.dtype)
        return held.shape == expected.shape and torch.equal(held.float(), expected.float())

    def _expert_differences(self, name: str, expected: Tensor) -> list[str]:
        expert, projection = name.removesuffix(".weight").rsplit(".", 1)
        parts = self._experts.setdefault(expert, {})
        parts[projection] = expected
        if len(parts) < 3:
            return []
        parts = self._experts.pop(expert)
        layer_name, index = expert.rsplit(".", 1)
        module_name, module = next((n, m) for n, m in self._modules.items() if n.startswith(layer_name) and hasattr(m, "w13_weight"))
        local = module.expert_map_manager.map_global_to_local(int(index))
        if local < 0:
            return []  # another rank of the engine holds this expert
        self._visited |= {(module_name, leaf, str(local)) for leaf in module._parameters}
        self.num_compared += 3
        gate, up, down = (_expert_part(module, parts[p], axis) for p, axis in (("gate_proj", 0), ("up_proj", 0), ("down_proj", 1)))
        if module.w13_weight.device.type != "cpu":
            stored_13, stored_2 = module.w13_weight[local], module.w2_weight[local]
            if stored_13.shape[0] == 2 * len(gate) and torch.equal(stored_13, torch.cat([gate, up])) and torch.equal(stored_2, down):
                return []
        return [] if _computes_expert(module, int(index), gate, up, down) else [expert]


def _local_part(module: nn.Module, full: Tensor, part: int | None) -> tuple[Tensor, slice]:
    """This rank's part of a full tensor and the rows of the module's tensor that hold it; `part` numbers a fused projection."""
    if hasattr(module, "shard_indices"):  # embedding or head, cut along the vocabulary and padded
        first, last = module.shard_indices.org_vocab_start_index, module.shard_indices.org_vocab_end_index
        return full[first:last], slice(0, last - first)
    rank = getattr(module, "tp_rank", 0)
    if part is not None:
        if hasattr(module, "num_kv_head_replicas"):
            sizes = [n * module.head_size for n in (module.num_heads, module.num_kv_heads, module.num_kv_heads)]
            index = rank if part == 0 else rank // module.num_kv_head_replicas
        else:
            sizes, index = [size // module.tp_size for size in module.output_sizes], rank
        first = sum(sizes[:part])
        return full.narrow(0, index * sizes[part], sizes[part]), slice(first, first + sizes[part])
    if full.dim() == 2 and getattr(module, "input_size_per_partition", full.shape[1]) != full.shape[1]:
        size = module.input_size_per_partition
        return full.narrow(1, rank * size, size), slice(None)
    size = getattr(module, "output_size_per_partition", len(full))
    return full.narrow(0, rank * size if size != len(full) else 0, size), slice(None)


def _expert_part(experts: nn.Module, full: Tensor, axis: int) -> Tensor:
    size = experts.moe_config.intermediate_size_per_partition_unpadded or experts.intermediate_size_per_partition
    rank = experts.moe_config.tp_rank if size != full.shape[axis] else 0
    return full.narrow(axis, rank * size, size).to(experts.w13_weight.device, experts.w13_weight.dtype)


def _computed_weight(module: nn.Module) -> Tensor:
    """[out, in] of a repacked linear layer: what it makes of the rows of the identity matrix, which is exact in any precision."""
    is_head = hasattr(module, "shard_indices")
    in_features = module.embedding_dim if is_head else getattr(module, "input_size_per_partition", 0) or module.input_size
    identity = torch.eye(in_features, dtype=module.weight.dtype if is_head else module.params_dtype)
    return torch.cat([module.quant_method.apply(module, rows, bias=None) for rows in identity.split(_PROBE_ROWS)]).t()


def _computes_expert(experts: nn.Module, index: int, gate: Tensor, up: Tensor, down: Tensor) -> bool:
    """Whether a live expert, fed probe tokens routed to it alone, gives what its three weights give."""
    generator = torch.Generator().manual_seed(0)
    probe = torch.randn(_EXPERT_PROBE_TOKENS, gate.shape[1], generator=generator).to(gate)
    weights = torch.ones(_EXPERT_PROBE_TOKENS, 1, device=probe.device)
    ids = torch.full((_EXPERT_PROBE_TOKENS, 1), index, dtype=torch.int32, device=probe.device)
    held = experts.quant_method.apply(experts, probe, weights, ids, None, None).float()
    x = probe.float()
    expected = (torch.nn.functional.silu(x @ gate.float().t()) * (x @ up.float().t())) @ down.float().t()
    tolerance = 1e-4 if probe.dtype == torch.float32 else 3e-2
    return bool((held - expected).norm() <= tolerance * expected.norm())
