"""The head that grows with the tasks, and the prompt of a model by its kind."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from task.config.parsing import parse
from task.models.model import Head, build_model, prompt_of
from task.prompts.coda import CodaPrompt
from task.prompts.decomposed import DecomposedPrompt

DIM, ROWS = 400, 300


def grown(init: str, seed: int = 0) -> Head:
    head = Head(DIM, seed, init=init)
    head.grow(ROWS)
    return head


def test_rows_start_normal_with_deviation_002_and_no_bias() -> None:
    weight = grown("normal").weight.detach().double().numpy()
    assert weight.std() == pytest.approx(0.02, rel=0.01)
    assert np.abs(weight).max() > 4 * 0.02  # no uniform distribution has such values
    assert not grown("normal").bias.any()


def test_rows_start_as_torchs_linear_does() -> None:
    """Uniform in +-1/sqrt(400) = 0.05, deviation 0.05/sqrt(3), weight and bias alike."""
    head = grown("linear")
    reference = torch.nn.Linear(DIM, ROWS)
    for ours, theirs in ((head.weight, reference.weight), (head.bias, reference.bias)):
        values = ours.detach().double().numpy().ravel()
        assert 0.97 * 0.05 < -values.min() <= 0.05
        assert 0.97 * 0.05 < values.max() <= 0.05
        assert values.std() == pytest.approx(0.05 / 3**0.5, rel=0.08)
        assert values.std() == pytest.approx(float(theirs.detach().std()), rel=0.12)
        assert abs(values.mean()) < 0.005
    assert abs(np.corrcoef(head.bias.detach(), head.weight.detach()[:, -1])[0, 1]) < 0.2


@pytest.mark.parametrize("init", ["normal", "linear"])
def test_a_start_depends_on_the_seed_and_on_the_rows_before(init: str) -> None:
    first, again, other = grown(init), grown(init), grown(init, seed=1)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)
    before = first.weight.detach().clone()
    first.grow(ROWS)
    assert torch.equal(first.weight[:ROWS], before)
    assert not torch.equal(first.weight[ROWS:], before)
    assert first.bias.shape == (2 * ROWS,)


def test_the_run_key_reaches_the_head(tiny: dict) -> None:
    def weight(**values: str) -> torch.Tensor:
        return build_model(parse(tiny | {"method": "head-only"} | values), [4]).head.weight.detach()

    assert torch.equal(weight(), weight(**{"head-init": "normal"}))
    linear, bound = weight(**{"head-init": "linear"}), weight().shape[1] ** -0.5
    assert 0.9 * bound < linear.abs().max() <= bound


def test_a_prompt_of_another_kind_is_an_error_that_names_both() -> None:
    model = SimpleNamespace(prompt=DecomposedPrompt([0], 2, 1, 4, 0))
    assert prompt_of(model, DecomposedPrompt) is model.prompt  # type: ignore[arg-type]  # all that it needs of a model
    with pytest.raises(TypeError, match="the prompt is DecomposedPrompt, the method needs CodaPrompt"):
        prompt_of(model, CodaPrompt)  # type: ignore[arg-type]  # the same
