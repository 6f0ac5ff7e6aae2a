"""Rewards: right and wrong answers, limits on time and on failures, functions of the user's own, workers that never outlive the trainer."""

import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np
import pytest
import reasoning_gym
from hypothesis import given, settings
from hypothesis import strategies as st

from megagrpo.config.schema import Config, Reward
from megagrpo.rewards import Scorer, Tally, check_failures
from megagrpo.rewards.calls import Call, Outcome
from megagrpo.rewards.math_answer import MathGrader
from megagrpo.rewards.math_worker import final_answer, judge, last_boxed
from megagrpo.types import Prompt, Sample

# sympy sets out to write this number down.
ENDLESS = r"\boxed{9^{9^{9^{9}}}}"


def call(answer, response):
    return Call(prompt="", response=response, columns={"answer": answer})


@pytest.fixture(scope="module")
def grader():
    grader = MathGrader(timeout_s=20.0, num_workers=2)
    yield grader
    grader.close()


GSM8K = "She makes 9 * 2 = $<<9*2=18>>18 every day.\n#### 18"
RIGHT = [
    ("42", "42"),
    ("42", " 42\n"),
    ("-8", "-8"),
    (42, "The answer is 42."),
    (GSM8K, "9 * 2 is 18, so she makes $18 a day."),
    (GSM8K, r"Therefore \boxed{18}"),
    ("66", "The answer is 48 + 16 = <<48+16=64>>64 points, and two.\n#### 66"),
    ("#### 1,234", "In total: 1234"),
    ("1234", r"\boxed{1,234}"),
    ("42", r"\boxed{41}, no: \boxed{42}"),
    ("42", "17+25=42"),
    ("42", "$17+25=42$"),
    ("0.75", "3/4"),
    ("3/4", r"$\frac{3}{4}$"),
    (r"The area is \boxed{\frac{1}{2}}.", r"\boxed{\frac{2}{4}}"),
    ("$18$", "18"),
    ("32000", r"\boxed{3.2 \times 10^4}"),
    (r"1+\sqrt{2}", r"\boxed{\sqrt{2}+1}"),
    ("0.5", r"\boxed{50\%}"),
    ("(1,2]", r"$(1, 2]$"),
    (r"\text{Evelyn}", r"\boxed{\text{Evelyn}}"),
]
WRONG = [
    ("42", "41"),
    ("42", ""),
    ("42", "no idea"),
    ("-8", "8"),
    (GSM8K, "9"),
    ("42", r"\boxed{42}, no: \boxed{41}"),
    ("8", r"\boxed{7, 8}"),
    ("1/2", "0.51"),
    # what is asked is no answer, although math-verify finds it equal
    ("42", "17+25"),
    ("42", "$17+25$"),
    ("42", r"\boxed{6 \times 7}"),
]


@pytest.mark.parametrize("expected", [1.0, 0.0])
def test_math_answer(grader, expected):
    pairs = RIGHT if expected else WRONG
    outcomes = grader.grade([call(*pair) for pair in pairs])
    assert [pair for pair, outcome in zip(pairs, outcomes, strict=True) if outcome != Outcome(score=expected)] == []


numbers = st.integers(-(10**15) + 1, 10**15 - 1)
spellings = st.sampled_from(["{}", "{:,}", "{:+}", "{:04d}", " {}\n", r"so \boxed{{{}}}", r"\boxed{{{:,}}} it is"])


@settings(deadline=None)
@given(expected=numbers, off_by=st.sampled_from([0, 0, 1, -1, 1000]), spelling=spellings)
def test_integers_judged_at_sight_are_judged_as_math_verify_does(grader, expected, off_by, spelling):
    given_answer = expected + off_by
    response = spelling.format(given_answer)
    (at_sight,) = grader.grade([call(expected, response)])
    assert at_sight == Outcome(score=float(off_by == 0))
    # math-verify finds no number in -001
    if abs(given_answer) < 10**15 and "+" not in response and not response.startswith("-0"):
        assert judge(str(expected), response) == at_sight


def test_final_answers_are_found():
    assert last_boxed(r"\boxed{1} and \boxed {\frac{1}{2}} are") == r"\frac{1}{2}"
    assert last_boxed(r"\boxed{\left\{1, 2\right.}") == r"\left\{1, 2\right."
    assert last_boxed(r"} \boxed{7} { \boxed{8") == "7"
    assert last_boxed("42") is None
    assert final_answer("a #### 5 #### -1,000 ") == "-1,000"
    assert final_answer(r"#### Solution: \boxed{x^{2}}.") == "x^{2}"
    assert final_answer(" 42 ") == "42"


def test_a_useless_reference_is_a_failure_and_not_a_wrong_answer(grader):
    missing, empty = grader.grade([call(None, "42"), call("", "42")])
    assert "data.answer_key" in missing.failure
    assert "no mathematical expression" in empty.failure


def test_timeout_scores_zero_and_the_pool_goes_on():
    grader = MathGrader(timeout_s=1.0, num_workers=1)
    calls = [call("42", ENDLESS), call("1/2", "0.5"), call("42", ENDLESS), call("1/3", "1/3")]
    assert grader.grade(calls) == [Outcome(timed_out=True), Outcome(score=1.0), Outcome(timed_out=True), Outcome(score=1.0)]
    grader.close()


def test_a_worker_that_does_not_keep_its_own_limit_is_replaced():
    others = {child.pid for child in multiprocessing.active_children()}
    grader = MathGrader(timeout_s=1.0, num_workers=1)
    grader.grade([call("1/2", "0.5")])
    (pid,) = {child.pid for child in multiprocessing.active_children()} - others
    threading.Timer(0.5, os.kill, (pid, signal.SIGSTOP)).start()  # as deaf to its alarm as inside a long call to C
    assert grader.grade([call("42", ENDLESS), call("1/2", "0.5")]) == [Outcome(timed_out=True), Outcome(score=1.0)]
    assert pid not in {child.pid for child in multiprocessing.active_children()}
    grader.close()


def test_a_killed_worker_costs_one_call():
    others = {child.pid for child in multiprocessing.active_children()}
    grader = MathGrader(timeout_s=60.0, num_workers=1)
    grader.grade([call("1/2", "0.5")])  # it has started
    (pid,) = {child.pid for child in multiprocessing.active_children()} - others
    threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()
    struck, after = grader.grade([call("42", ENDLESS), call("1/2", "0.5")])
    assert struck == Outcome(failure="the worker process died (exit code -9)")
    assert after == Outcome(score=1.0)
    (pid,) = {child.pid for child in multiprocessing.active_children()} - others
    os.kill(pid, signal.SIGKILL)  # while it has nothing to do
    time.sleep(0.5)
    assert grader.grade([call("1/2", "0.5")]) == [Outcome(score=1.0)]
    grader.close()
    assert {child.pid for child in multiprocessing.active_children()} == others


TRAINER = f"""
import multiprocessing, os, sys, threading, time
from megagrpo.rewards.calls import Call
from megagrpo.rewards.math_answer import MathGrader

if __name__ == "__main__":
    grader = MathGrader(timeout_s=600.0, num_workers=2)
    call = lambda response: Call(prompt="", response=response, columns={{"answer": "1/2"}})
    grader.grade([call("0.5"), call("0.5")])
    print(*[child.pid for child in multiprocessing.active_children()], flush=True)
    grader.grade([call({ENDLESS!r})])  # one worker at work, one idle
"""


def test_workers_die_with_a_killed_trainer(tmp_path):
    script = tmp_path / "trainer.py"
    script.write_text(TRAINER)
    trainer = subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True)
    pids = [int(pid) for pid in trainer.stdout.readline().split()]
    assert len(pids) == 2 and all(is_running(pid) for pid in pids)
    time.sleep(0.5)  # the endless call has begun
    trainer.kill()
    trainer.wait()
    deadline = time.monotonic() + 30
    while any(is_running(pid) for pid in pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in pids if is_running(pid)]


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"  # dead, if nobody has taken notice yet
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_an_interrupt_leaves_no_late_replies():
    grader = MathGrader(timeout_s=60.0, num_workers=1)
    grader.grade([call("1/2", "0.5")])
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    with pytest.raises(KeyboardInterrupt):
        grader.grade([call("42", ENDLESS)])
    assert grader.grade([call("1/3", "0.5")]) == [Outcome(score=0.0)]
    grader.close()


PROMPTS = [
    Prompt(id=70, text="<user>2+3=", token_ids=[1], columns={"prompt": "2+3=", "answer": "5", "level": 1}),
    Prompt(id=71, text="<user>4+4=", token_ids=[2], columns={"prompt": "4+4=", "answer": "8", "level": 2}),
]
SAMPLES = [
    Sample(
        id=index,
        group=index // 2,
        prompt_id=70 + index // 2,
        prompt_ids=np.zeros(1, np.int32),
        response_ids=np.zeros(1, np.int32),
        rollout_logprobs=None,
        finish_reason="stop",
    )
    for index in range(4)
]
RESPONSES = ["5", "6", r"\boxed{8}", "8"]


def score(functions, *, responses=RESPONSES, **reward):
    scorer = Scorer(Config(reward=Reward(functions=functions, num_workers=1, **reward)))
    scores = scorer.score(SAMPLES, responses=responses, prompts=PROMPTS)
    scorer.close()
    return scores


def test_rewards_are_weighed():
    scores = score({"math_answer": 1.0, "format": 0.25})
    assert [sample.reward for sample in scores.samples] == [1.0, 0.0, 1.25, 1.0]
    assert scores.samples[2].reward_parts == {"math_answer": 1.0, "format": 1.0}
    assert [sample.id for sample in scores.samples] == [0, 1, 2, 3]
    assert scores.tally == Tally(num_calls=4, num_failures=Counter(), num_timeouts=0, examples=())


def test_timeouts_are_counted():
    scores = score({"math_answer": 1.0}, responses=["5", ENDLESS, "8", "7"], timeout_s=1.0)
    assert [sample.reward for sample in scores.samples] == [1.0, 0.0, 1.0, 0.0]
    assert scores.tally.metrics() == {"reward/timeout_rate": 0.25, "reward/failure_rate": 0.0}


@pytest.fixture
def rewards_file(tmp_path):
    def write(source):
        path = tmp_path / "my_rewards.py"
        path.write_text(source)
        return str(path)

    return write


def test_function_from_a_file_gets_the_columns_it_names(rewards_file):
    file = rewards_file(
        "def levelled(response, *, prompt, answer, level):\n    return level * (prompt + response == '<user>2+3=' + answer)\n"
    )
    scores = score({f"{file}:levelled": 2.0})
    assert [sample.reward for sample in scores.samples] == [2.0, 0.0, 0.0, 0.0]
    assert scores.samples[0].reward_parts == {"levelled": 1.0}


def test_function_from_a_module_gets_all_columns(rewards_file, tmp_path, monkeypatch):
    rewards_file("def count(response, **columns):\n    return len(columns) + 0.1 * columns['level']\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert [sample.reward for sample in score({"my_rewards:count": 1.0}).samples] == [3.1, 3.1, 3.2, 3.2]


FAILING = {
    "def fragile(response):\n    return 1 / (int(response) - 6)\n": r"ZeroDivisionError: division by zero \(.*my_rewards.py:2\)",
    "def fragile(response):\n    return 0.5 if response != '6' else float('nan')\n": "returned nan, which is no finite number",
    "def fragile(response):\n    return 0.5 if response != '6' else None\n": "returned None, which is no finite number",
}


@pytest.mark.parametrize(("source", "reason"), FAILING.items())
def test_a_failing_function_is_counted_and_named(rewards_file, caplog, source, reason):
    scores = score({f"{rewards_file(source)}:fragile": 1.0}, responses=["5", "6", "7", "8"])
    assert [sample.reward == 0.0 for sample in scores.samples] == [False, True, False, False]
    assert scores.tally.num_failures == {"fragile": 1} and scores.tally.metrics()["reward/failure_rate"] == 0.25
    assert "fragile on prompt 70, sample 1" in caplog.text
    check_failures(scores.tally, max_failure_fraction=0.25)
    with pytest.raises(ValueError, match=rf"fragile failed in 1 of 4 calls.*max_failure_fraction=0.2;.*\n  fragile on prompt 70.*{reason}"):
        check_failures(scores.tally, max_failure_fraction=0.2)


def test_failures_of_all_ranks_count_together():
    bad = Tally(num_calls=4, num_failures=Counter(fragile=2), num_timeouts=1, examples=("a", "b"))
    good = Tally(num_calls=16, num_failures=Counter(), num_timeouts=0, examples=())
    total = Tally.total([good, bad, bad])
    assert total == Tally(num_calls=24, num_failures=Counter(fragile=4), num_timeouts=2, examples=("a", "b", "a"))
    check_failures(Tally.total([bad, good]), max_failure_fraction=0.1)
    with pytest.raises(ValueError, match="4 of 24"):
        check_failures(total, max_failure_fraction=0.1)


def test_a_missing_answer_column_says_which_setting_names_it():
    scorer = Scorer(Config(reward=Reward(num_workers=1)))
    prompts = [Prompt(id=1, text="2+3=", token_ids=[1], columns={"prompt": "2+3=", "answer": None})]
    scores = scorer.score(SAMPLES[:2], responses=["5", "6"], prompts=prompts)
    scorer.close()
    with pytest.raises(ValueError, match="failed in 2 of 2 calls(.|\n)*data.answer_key"):
        check_failures(scores.tally, max_failure_fraction=0.9)


UNKNOWN = {
    "math_anwser": "neither one of math_answer.*did you mean math_answer",
    "absent.py:reward": "the file absent.py does not exist",
    "no_such_package.rewards:reward": "no module no_such_package; .*PYTHONPATH",
    "json:lods": "json has no function lods; did you mean loads",
}


@pytest.mark.parametrize(("name", "message"), UNKNOWN.items())
def test_unknown_functions(name, message):
    with pytest.raises(ValueError, match=message):
        Scorer(Config(reward=Reward(functions={name: 1.0})))


def test_mistakes_of_the_settings(rewards_file):
    with pytest.raises(ValueError, match=r"reward.format_pattern='\(' is no regular expression"):
        Scorer(Config(reward=Reward(functions={"format": 1.0}, format_pattern="(")))
    file = rewards_file("def format(response):\n    return 1.0\n")
    with pytest.raises(ValueError, match="two functions are called format"):
        Scorer(Config(reward=Reward(functions={"format": 1.0, f"{file}:format": 1.0})))


def test_an_error_inside_a_users_module_is_shown_as_it_is(rewards_file, tmp_path, monkeypatch):
    (tmp_path / "needs_more.py").write_text("import no_such_dependency\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="no_such_dependency"):
        Scorer(Config(reward=Reward(functions={"needs_more:reward": 1.0})))


def test_reasoning_gym_scores_its_own_answers():
    entries = list(reasoning_gym.create_dataset("chain_sum", size=2, seed=0))
    prompts = [Prompt(id=index, text=entry["question"], token_ids=[1], columns=entry) for index, entry in enumerate(entries)]
    right = [entry["answer"] for entry in entries]
    responses = [right[0], f"It is <answer> {right[0]} </answer>, I think", rf"\boxed{{{right[1]}}}", "99999"]
    scores = Scorer(Config(reward=Reward(functions={"reasoning_gym": 1.0}))).score(SAMPLES, responses=responses, prompts=prompts)
    first, tagged, boxed, wrong = (sample.reward for sample in scores.samples)
    assert first == tagged == boxed == 1.0 and wrong < 0.1
    assert not scores.tally.num_failures


def test_rewards_import_no_torch():
    subprocess.run([sys.executable, "-c", "import megagrpo.rewards, sys; assert 'torch' not in sys.modules"], check=True)
