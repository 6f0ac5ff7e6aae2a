"""Where the time of a step goes: phases -> seconds per phase, which add up to the step.

Knows no clock but the host's: work queued on a device is waited for at the end of a phase. Writes nothing.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class StepTimer:
    """Splits the time between two finish_step() calls over the phases entered in it; what is outside of all is `unaccounted`.

    Names are verl's: gen, reward, adv, old_log_prob, ref, update_actor, update_weights, testing, save_checkpoint; ours: offload,
    wake, logging. A phase inside another takes its time out of the outer one, so that nothing is counted twice.
    synchronize waits for the device (torch.cuda.synchronize); without it a phase that only queues kernels would look free and
    the next one slow. Once per phase costs microseconds.
    """

    def __init__(self, *, synchronize: Callable[[], None] | None = None) -> None:
        self._synchronize = synchronize
        self._open: list[str] = []
        self._seconds: dict[str, float] = defaultdict(float)
        self._last = time.perf_counter()

    @property
    def current(self) -> str | None:
        """The innermost open phase. After an exception that left a phase it is still that phase: where it failed."""
        innermost = self._open[-1:]  # a copy: the console asks from another thread
        return innermost[0] if innermost else None

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside as `name`."""
        self._charge()
        self._open.append(name)
        yield  # no finally: an exception ends the run, and `current` then names the phase it came from
        if self._synchronize:
            self._synchronize()
        self._charge()
        self._open.pop()

    def finish_step(self) -> dict[str, float]:
        """Seconds since the last call: `timing_s/<phase>`, `timing_s/unaccounted` and their sum `timing_s/step`. Starts the next step."""
        assert not self._open, f"finish_step inside the phase {self.current}"
        self._charge()
        seconds = {"unaccounted": 0.0, **self._seconds}
        self._seconds.clear()
        seconds["step"] = sum(seconds.values())
        return {f"timing_s/{name}": value for name, value in seconds.items()}

    def _charge(self) -> None:
        now = time.perf_counter()
        self._seconds[self.current or "unaccounted"] += now - self._last
        self._last = now
