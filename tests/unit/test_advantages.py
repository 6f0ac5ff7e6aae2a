"""Advantages against values worked out by hand from the published formulas."""

import numpy as np
import pytest

from megagrpo.advantages import estimate_advantages, group_normalised, leave_one_out, mean_centred
from megagrpo.config.schema import Algorithm
from megagrpo.types import Sample


def make_samples(groups, rewards):
    return [
        Sample(
            id=i,
            group=group,
            prompt_id=group,
            prompt_ids=np.array([1], dtype=np.int32),
            response_ids=np.array([2], dtype=np.int32),
            rollout_logprobs=None,
            finish_reason="stop",
            reward=reward,
        )
        for i, (group, reward) in enumerate(zip(groups, rewards, strict=True))
    ]


@pytest.mark.parametrize(
    ("rewards", "epsilon", "expected"),
    [
        ([1, 0, 0, 1], 1e-6, [0.8660239, -0.8660239, -0.8660239, 0.8660239]),
        ([1, 0, 0, 1], 1e-4, [0.8658754, -0.8658754, -0.8658754, 0.8658754]),
        ([1, 0, 0, 0], 1e-6, [1.499997, -0.499999, -0.499999, -0.499999]),
        ([1], 1e-6, [0.999999]),
        ([0], 1e-6, [0]),
    ],
)
def test_group_normalised(rewards, epsilon, expected):
    np.testing.assert_allclose(group_normalised(np.array(rewards, dtype=float), epsilon=epsilon), expected, atol=1e-6, rtol=0)


def test_mean_centred_and_leave_one_out():
    rewards = np.array([1.0, 0, 0, 0])
    np.testing.assert_allclose(mean_centred(rewards), [0.75, -0.25, -0.25, -0.25])
    np.testing.assert_allclose(leave_one_out(rewards), [1, -1 / 3, -1 / 3, -1 / 3])
    np.testing.assert_array_equal(mean_centred(np.array([0.3])), [0.3])
    np.testing.assert_array_equal(leave_one_out(np.array([0.3])), [0.3])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("epsilon", [0.0, 1e-6])
def test_equal_rewards_give_exactly_zero(estimator, epsilon):
    algorithm = Algorithm(advantage_estimator=estimator, advantage_epsilon=epsilon)
    for reward in (0.0, 0.1, 1 / 3):  # the mean of three 0.1 is not 0.1
        assert not estimate_advantages(make_samples([0, 0, 0], [reward] * 3), algorithm).any()


def test_groups_are_independent_of_their_order_and_of_each_other():
    algorithm = Algorithm(advantage_estimator="grpo", advantage_epsilon=1e-6)
    together = estimate_advantages(make_samples([5, 2, 5, 2, 5, 2, 5, 2], [1, 1, 0, 0, 0, 0, 1, 0]), algorithm)
    np.testing.assert_allclose(together[0::2], group_normalised(np.array([1.0, 0, 0, 1]), epsilon=1e-6))
    np.testing.assert_allclose(together[1::2], group_normalised(np.array([1.0, 0, 0, 0]), epsilon=1e-6))


def test_a_sample_without_reward_is_refused():
    with pytest.raises(AssertionError, match="finite reward"):
        estimate_advantages(make_samples([0, 0], [1.0, float("nan")]), Algorithm())
