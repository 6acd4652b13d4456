import numpy as np
import pytest
import torch

from policies import PolicyError
from policies.small.encoders import Normalizer


def rows(count: int, seed: int) -> torch.Tensor:
    """Columns of very different scale; the last is large and nearly constant, the first constant."""
    x = torch.randn(count, 4, generator=torch.Generator().manual_seed(seed))
    return x * torch.tensor([0.0, 1.0, 1e-3, 1e-1]) + torch.tensor([2.0, 0.0, 0.0, 1e3])


def test_identity_until_first_observe():
    x = torch.linspace(-10, 10, 40).view(10, 4)
    assert torch.equal(Normalizer(4)(x), x)


def test_statistics_equal_numpy_however_the_rows_are_split():
    whole, parts = Normalizer(4), Normalizer(4)
    x = rows(1000, 0)
    whole.observe(x)
    for part in x.split([1, 0, 99, 900]):
        parts.observe(part)
    reference = x.double().numpy()
    for normalizer in (whole, parts):
        np.testing.assert_allclose(normalizer.mean, reference.mean(0), rtol=1e-12, atol=1e-15)
        np.testing.assert_allclose(normalizer.var, reference.var(0), rtol=1e-9, atol=1e-15)
        assert normalizer.count == 1000


def test_rows_of_a_rollout_may_have_more_axes():
    flat, shaped = Normalizer(4), Normalizer(4)
    flat.observe(rows(60, 1))
    shaped.observe(rows(60, 1).view(3, 20, 4))
    assert torch.equal(flat.mean, shaped.mean) and torch.equal(flat.var, shaped.var)


def test_output_is_float32_standardised_and_clipped():
    normalizer = Normalizer(4)
    x = rows(1000, 2)
    normalizer.observe(x)
    out = normalizer(x)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out[:, 1:].mean(0), torch.zeros(3), rtol=0, atol=1e-4)
    torch.testing.assert_close(out[:, 1:].std(0, correction=0), torch.ones(3), rtol=0, atol=1e-2)
    assert torch.equal(out[:, 0], torch.zeros(1000))
    assert normalizer(x + 1e6).max() == 10 and normalizer(x - 1e6).min() == -10


def test_non_finite_rows_are_refused_and_leave_no_trace():
    normalizer = Normalizer(4)
    normalizer.observe(rows(10, 3))
    mean = normalizer.mean.clone()
    bad = rows(10, 4)
    bad[3, 2] = torch.nan
    with pytest.raises(PolicyError, match=r"columns \[2\]"):
        normalizer.observe(bad)
    assert torch.equal(normalizer.mean, mean) and normalizer.count == 10
