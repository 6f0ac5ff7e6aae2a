"""Stage 3: responses -> rewards. `Scorer` is all that the rest of the package needs.

A reward function of your own is named in reward.functions as `package.module:function` or `path/file.py:function` and looks like this:

    def brevity(response: str, *, prompt: str, answer=None, **columns) -> float:
        return 1.0 / (1 + len(response))

It is called once per response. `response` is the decoded text, `prompt` what the model saw (chat template included), `answer` the
column data.answer_key, and every other column of the dataset comes by its name: a function gets those it has parameters for, or all
with `**columns`. It returns a finite number. A call that raises or returns anything else scores 0, is counted and reported with its prompt.
"""

from megagrpo.rewards.scorer import Scorer, Scores, Tally, check_failures

__all__ = ["Scorer", "Scores", "Tally", "check_failures"]
