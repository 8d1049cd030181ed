"""Fed-CPrompt's contrastive loss; numbers by hand or in float64."""

import pytest
import torch
from torch import nn

from client_app.objectives.base import Objective
from client_app.objectives.fed_cprompt import FedCPrompt, contrast
from task.config.parsing import parse
from task.keys import ConfigError
from task.message import Packet
from task.models.feature_cache import Inputs
from tests.helpers.coda import QUERY, D, J, L, M, coda


def options(**keys):
    return parse({"method": "fed-cprompt", **{f"fed-cprompt-{n}": v for n, v in keys.items()}}).options


def test_keys_name_the_method_that_reads_them():
    with pytest.raises(ConfigError, match=r"fed-cprompt-weight = 2.0 would be ignored: only method 'fed-cprompt'"):
        parse({"method": "fedavg", "fed-cprompt-weight": 2.0})


def filled(value):
    """A task prompt all of whose components are the vector (value, 0, 0, ...)."""
    prompt = torch.zeros(J, M, 2, L, D)
    prompt[:, :, 0, 0, 0] = value
    return prompt


@pytest.mark.parametrize(
    ("older", "keys", "expected"),
    [
        ([], {}, 2.0),  # the first task: |3 - 5|
        ([4.0, 13.0], {}, 2.0 - 0.5 * 1.0 + 1.0),  # the nearest older one is 1 away
        ([4.0, 13.0], {"push": 2.0, "margin": 0.25}, 2.0 - 2.0 * 1.0 + 0.25),
        ([13.0], {"push": 1.0}, 0.0),  # 2 - 10 + 1 is below 0
    ],
)
def test_contrast_by_hand(older, keys, expected):
    loss = contrast(filled(3.0), filled(5.0), [filled(o) for o in older], options(**keys))
    assert float(loss) == pytest.approx(expected)


def test_contrast_pulls_to_the_global_prompt_and_off_the_nearest_older_one():
    local = filled(3.0).requires_grad_()
    contrast(local, filled(5.0), [filled(4.0)], options()).backward()
    # towards 5 by 1 / sqrt(J M) a component, off 4 (downwards) by half of that
    assert local.grad[:, :, 0, 0, 0].tolist() == [pytest.approx([(-1 + 0.5) / (J * M)] * M)] * J
    assert local.grad.count_nonzero() == J * M


def test_contrast_has_a_finite_gradient_where_training_starts():
    local = filled(3.0).requires_grad_()
    contrast(local, local.detach().clone(), [], options()).backward()
    assert local.grad.count_nonzero() == 0


class Tiny(nn.Module):
    """What an objective needs of a model: a CODA prompt, whose mean is all that the logits depend on."""

    def __init__(self):
        super().__init__()
        self.prompt = coda(tasks=2)

    def current_rows(self):
        return torch.tensor([2, 3])

    def local_targets(self, rows):
        return rows - 2

    def forward(self, images, query=None):
        return torch.stack([p.mean((1, 2, 3)) for p in self.prompt(images).values()] * 2, dim=1)


def test_objective_adds_the_weighted_contrast_to_the_rounds_start():
    config = parse({"method": "fed-cprompt", "fed-cprompt-weight": 3.0})
    model, rows = Tiny(), torch.tensor([2, 3, 2, 2, 3])
    objective = FedCPrompt(config, Packet())
    objective.begin_epoch(model, None, 0, torch.Generator())
    start = model.prompt.prompts[1].detach().clone()
    with torch.no_grad():
        model.prompt.prompts[1] += 0.3
    objective.begin_epoch(model, None, 1, torch.Generator())  # a later epoch keeps what the round began with
    loss, logits = objective.loss(model, Inputs(QUERY), rows)
    base, expected = Objective(config, Packet()).loss(model, Inputs(QUERY), rows)
    old, now = model.prompt.prompts[0].detach().double(), model.prompt.prompts[1].detach().double()
    scale = (J * M) ** -0.5
    away = float((now - start.double()).square().sum().sqrt()) * scale
    apart = float((now - old).square().sum().sqrt()) * scale
    assert float((loss - base).detach()) == pytest.approx(3.0 * max(away - 0.5 * apart + 1.0, 0), rel=1e-4)
    assert torch.equal(logits, expected)
