"""How many ranks every kind of parallelism gets on a number of processes, and how to say it.

Config, world size -> sizes and a short table. Builds no process group: that is mcore/parallel.py.
"""

from __future__ import annotations

from dataclasses import dataclass

from megagrpo.config.schema import Config


@dataclass(frozen=True, slots=True)
class Layout:
    """The actor's and the rollout's layout over `world_size` processes; sizes are rounded down where they do not fit.

    Example: 8 processes with actor TP2 PP2 have data_parallel_size 2; with rollout TP2 there are num_engines 4.
    """

    config: Config
    world_size: int

    def actor_multiples(self) -> dict[str, int]:
        """Products of actor sizes that must divide the world size, by how they come about (Megatron's parallel_state.py).

        Dense layers and experts are laid out separately over the same ranks: experts replace TP x CP by expert TP x EP.
        """
        actor = self.config.actor
        stages = actor.pipeline_model_parallel_size
        return {
            "actor tensor x pipeline x context parallel size": actor.tensor_model_parallel_size * stages * actor.context_parallel_size,
            "actor expert tensor x expert x pipeline parallel size": (
                actor.expert_tensor_parallel_size * actor.expert_model_parallel_size * stages
            ),
        }

    @property
    def data_parallel_size(self) -> int:
        """Actor replicas of the dense layers."""
        return self.world_size // next(iter(self.actor_multiples().values()))

    @property
    def num_engines(self) -> int:
        """vLLM engines: contiguous blocks of rollout.tensor_parallel_size ranks."""
        return self.world_size // self.config.rollout.tensor_parallel_size

    def table(self) -> str:
        """The layout in words, a line each for the actor, the rollout and a step's samples."""
        return "\n".join(f"{name:9}  {words}" for name, words in self.describe().items())

    def describe(self) -> dict[str, str]:
        """The lines of table() by what they are about."""
        actor, rollout = self.config.actor, self.config.rollout
        sizes = {
            "TP": actor.tensor_model_parallel_size,
            "PP": actor.pipeline_model_parallel_size,
            "VPP": actor.virtual_pipeline_model_parallel_size or 1,
            "CP": actor.context_parallel_size,
            "EP": actor.expert_model_parallel_size,
            "ETP": actor.expert_tensor_parallel_size,
        }
        always = ("TP", "PP")
        shown = [f"{name}{size}" for name, size in sizes.items() if size > 1 or name in always]
        samples = rollout.num_prompts_per_step * rollout.num_samples_per_prompt
        return {
            "processes": str(self.world_size),
            "actor": f"{' '.join(shown)} DP{self.data_parallel_size}",
            "rollout": f"{self.num_engines} engine{'s' if self.num_engines != 1 else ''} of TP{rollout.tensor_parallel_size}",
            "step": f"{rollout.num_prompts_per_step} prompts x {rollout.num_samples_per_prompt} samples = {samples} responses, "
            f"optimizer steps: {self.config.algorithm.num_epochs * self.config.algorithm.num_mini_batches}",
        }
