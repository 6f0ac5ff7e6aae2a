"""Stage 3: the `math_answer` reward: is the response's final answer equal to the reference? Judged by math-verify in worker processes.

Calls -> outcomes. What sympy makes of a model's output can take forever or kill the process, so it never runs in the trainer:
workers have a time limit of their own, and one that does not keep it is killed and replaced. Judging itself is math_worker.py's.
"""

from __future__ import annotations

import multiprocessing
import os
import re
import time
from collections import deque
from contextlib import suppress
from multiprocessing.connection import wait

from megagrpo.rewards.calls import Call, Outcome
from megagrpo.rewards.math_worker import READY, final_answer, serve

_START_LIMIT_S = 120.0  # to import sympy, on a busy machine with a slow file system
_GRACE_S = 1.0  # for a worker to act on its own alarm, which it does not hear inside a long call to C
_INTEGER = re.compile(r"[+-]?(\d{1,15}|\d{1,3}(,\d{3}){1,4})")


class MathGrader:
    """A pool of worker processes. Create, use and close it on one thread that lives as long: its workers die with that thread."""

    def __init__(self, *, timeout_s: float, num_workers: int) -> None:
        self._timeout_s = timeout_s
        self._workers = [_Worker(timeout_s) for _ in range(num_workers)]

    def grade(self, calls: list[Call]) -> list[Outcome]:
        """One outcome per call, in order: 1 or 0, timed out, or a failure where there is no reference or a worker died."""
        outcomes = {index: outcome for index, call in enumerate(calls) if (outcome := _judge_at_sight(call))}
        waiting = deque(index for index in range(len(calls)) if index not in outcomes)
        self._workers = [worker if worker.is_alive() else _Worker(self._timeout_s) for worker in self._workers]
        try:
            while len(outcomes) < len(calls):
                for worker in self._workers:
                    if worker.is_idle and waiting:
                        index = waiting.popleft()
                        worker.start(index, final_answer(str(calls[index].columns["answer"])), calls[index].response)
                outcomes |= self._collect()
        finally:
            for worker in self._workers:
                if worker.index is not None:  # an exception interrupted us: its late reply would be taken for another call's
                    worker.kill()
        return [outcomes[index] for index in range(len(calls))]

    def close(self) -> None:
        """End all worker processes."""
        for worker in self._workers:
            worker.kill()
        self._workers = []

    def _collect(self) -> dict[int, Outcome]:
        """Waits until a worker has something to say or is overdue; returns what was finished by then."""
        active = [worker for worker in self._workers if not worker.is_idle]
        assert active, "calls wait, but no worker is at work on any: the grader is closed"
        until = min(worker.deadline for worker in active)
        readable = wait([worker.connection for worker in active], timeout=max(0.0, until - time.monotonic()))
        finished = {}
        for worker in active:
            index = worker.index
            if worker.connection in readable:
                outcome = worker.receive()
            elif worker.deadline <= time.monotonic():
                outcome = worker.give_up()
            else:
                continue
            if outcome and index is not None:
                finished[index] = outcome
        self._workers = [worker if worker.is_alive() else _Worker(self._timeout_s) for worker in self._workers]
        return finished


class _Worker:
    """One worker process as the trainer sees it: starting, idle, or at work on the call `index` until `deadline`."""

    def __init__(self, timeout_s: float) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would copy CUDA and vLLM state
        self._timeout_s = timeout_s
        self.connection, theirs = context.Pipe()
        arguments = {"timeout_s": timeout_s, "parent_pid": os.getpid()}
        self._process = context.Process(target=serve, args=(theirs,), kwargs=arguments, daemon=True, name="math_answer")
        self._process.start()
        theirs.close()  # so that the worker's death closes the pipe
        self._is_ready = False
        self.index: int | None = None
        self.deadline = time.monotonic() + _START_LIMIT_S

    @property
    def is_idle(self) -> bool:
        return self._is_ready and self.index is None

    def is_alive(self) -> bool:
        return not self.connection.closed and self._process.is_alive()

    def start(self, index: int, reference: str, response: str) -> None:
        self.index = index
        self.deadline = time.monotonic() + self._timeout_s + _GRACE_S
        with suppress(BrokenPipeError):  # it has just died, which receive() reports
            self.connection.send((reference, response))

    def receive(self) -> Outcome | None:
        """The outcome of the call, or None when the worker reports that it is ready."""
        try:
            message = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._dead()
        if message == READY:
            self._is_ready = True
            return None
        self.index = None
        return message

    def give_up(self) -> Outcome:
        """Kill a worker past its deadline."""
        if not self._is_ready:
            self.kill()
            raise RuntimeError(f"a math_answer worker process did not start within {_START_LIMIT_S:.0f} s")
        self.kill()
        return Outcome(timed_out=True)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()
        self.index = None

    def _dead(self) -> Outcome:
        self._process.join()
        exit_code = self._process.exitcode
        self.kill()
        if not self._is_ready:  # a new one would fare no better
            raise RuntimeError(f"a math_answer worker process died while starting (exit code {exit_code}); its error is printed above")
        return Outcome(failure=f"the worker process died (exit code {exit_code})")


def _judge_at_sight(call: Call) -> Outcome | None:
    """The outcome where it takes no sympy: no reference at all, or two plain integers; else None."""
    answer = call.columns.get("answer")
    if answer is None:
        return Outcome(failure="the row has no answer to compare with; name its column in data.answer_key")
    texts = final_answer(str(answer)), final_answer(call.response)
    if all(_INTEGER.fullmatch(text) for text in texts):
        expected, given = (int(text.replace(",", "")) for text in texts)
        return Outcome(score=float(expected == given))
    return None
