"""The head that grows with the tasks, and the prompt of a model by its kind."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from strategies.averaging import WeightedMean
from task.config.parsing import parse
from task.models.head import Head, QuadraticHead
from task.models.model import build_model, overwrite, prompt_of, to_arrays
from task.models.vit import Early
from task.prompts.coda import CodaPrompt
from task.prompts.decomposed import DecomposedPrompt
from task.utils.seeding import torch_rng
from tests.helpers.prompts import prompt_config

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


def test_the_seed_of_the_run_reaches_the_head(tiny: dict) -> None:
    first, again, other = (
        build_model(parse(tiny | {"method": "head-only", "seed": seed}), [4]).head.weight for seed in (0, 0, 1)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_a_prompt_of_another_kind_is_an_error_that_names_both() -> None:
    model = SimpleNamespace(prompt=DecomposedPrompt(prompt_config([0], pool=2), 4))
    assert prompt_of(model, DecomposedPrompt) is model.prompt  # type: ignore[arg-type]  # all that it needs of a model
    with pytest.raises(TypeError, match="the prompt is DecomposedPrompt, the method needs CodaPrompt"):
        prompt_of(model, CodaPrompt)  # type: ignore[arg-type]  # the same


def quadratic(rank: int, classes: int = 3, dim: int = 5) -> tuple[QuadraticHead, dict[str, np.ndarray]]:
    """A head of which every number is drawn, and these numbers in float64."""
    head, rng = QuadraticHead(dim, 0, 0, rank), np.random.default_rng(0)
    head.grow(classes)
    arrays = {name: rng.normal(size=tuple(p.shape)) for name, p in head.named_parameters()}
    for name, p in head.named_parameters():
        p.data.copy_(torch.from_numpy(arrays[name]))
    return head, arrays


@pytest.mark.parametrize("rank", [1, 4])
def test_a_quadratic_heads_logits(rank: int) -> None:
    """By class and image: w h + b + |P h - o|^2 / 2."""
    head, arrays = quadratic(rank)
    points = np.random.default_rng(1).normal(size=(7, 5))
    expected = np.empty((7, 3))
    for n, h in enumerate(points):
        for c in range(3):
            along = arrays["directions"][c] @ h - arrays["offsets"][c]
            expected[n, c] = arrays["weight"][c] @ h + arrays["bias"][c] + along @ along / 2
    with torch.no_grad():
        assert np.allclose(head(torch.from_numpy(points).float()), expected, atol=1e-4)


def test_a_quadratic_head_grows_and_is_not_trained() -> None:
    """New rows of directions are zero: such a class has a linear logit; the rank is cut to the length of a feature."""
    head, arrays = quadratic(9)
    assert head.directions.shape == (3, 5, 5)
    head.grow(2)
    assert head.directions.shape == (5, 5, 5)
    assert head.offsets.shape == (5, 5)
    assert np.allclose(head.directions[:3].detach(), arrays["directions"])
    assert not head.directions[3:].any()
    assert not head.offsets[3:].any()
    assert not any(p.requires_grad for p in head.parameters())
    points = torch.randn(4, 5, generator=torch.Generator().manual_seed(0))
    linear = points @ head.weight[3:].T + head.bias[3:]
    assert torch.allclose(head(points)[:, 3:], linear, atol=1e-6)


@pytest.mark.parametrize(
    ("keys", "kind", "width", "projected"),
    [
        ({}, Head, 112, 112),
        ({"afcl-head": "discriminant", "afcl-depth": 0.75}, Head, 224, 224),
        ({"afcl-depth": 1.0}, Head, 112, 112),
        ({"afcl-depth": 0.75, "afcl-random-features": 30}, Head, 224, 30),
        ({"afcl-head": "regularised", "afcl-rank": 4}, QuadraticHead, 112, 112),
    ],
)
def test_the_keys_say_which_head_and_what_it_takes(
    keys: dict, kind: type[Head], width: int, projected: int, tiny: dict
) -> None:
    model = build_model(parse(tiny | {"method": "afcl"} | keys), [4])
    assert type(model.head) is kind
    assert model.width == width
    assert model.head.weight.shape == (4, projected)
    assert model.trained_state() == model.message_state() == {}
    assert model.local_head is None


def test_class_means_do_not_go_down(tiny: dict) -> None:
    model = build_model(parse(tiny | {"method": "ncm"}), [4])
    assert model.trained_state() == model.message_state() == {}


def test_an_adapting_model_trains_a_local_head_of_the_first_task(tiny: dict) -> None:
    """In training its logits are the local head's, of the last feature alone; otherwise the computed head's."""
    model = build_model(parse(tiny | {"method": "fedrda"}), [4, 3])
    assert model.local_head is not None
    assert model.local_head.weight.shape == (4, 112)
    assert model.head.weight.shape == (7, 336)  # last and early class token, and the last one without LoRA
    moving = {"prompt.down", "prompt.up", "local_head.weight", "local_head.bias"}
    assert set(model.message_state()) == set(model.trained_state()) == moving
    assert set(model.shared_state()) == moving | {f"head.{n}" for n in ("weight", "bias", "directions", "offsets")}
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        features = model.features(images)
        assert torch.equal(model(images), model.head(features))
        local = features[:, :112] @ model.local_head.weight.T + model.local_head.bias
        assert torch.allclose(model.train()(images), local, atol=1e-5)
    arrays = {name: a + 1 for name, a in to_arrays(model.message_state()).items()}
    model.load(arrays)
    assert all((model.export()[name] == a).all() for name, a in arrays.items())
    with pytest.raises(ValueError, match="do not fit"):
        model.load({"prompt.down": arrays["prompt.down"]})


def test_a_mean_without_dimensions_and_a_reversed_array_fit_into_a_model() -> None:
    mean = WeightedMean()
    mean.add({"scale": np.array(3, np.float32)}, weight=2)
    tensors = {"scale": torch.zeros(()), "rows": torch.zeros(3)}
    overwrite(tensors, mean.arrays() | {"rows": np.arange(3, dtype=np.float32)[::-1]})
    assert {name: tensor.tolist() for name, tensor in tensors.items()} == {"scale": 3, "rows": [2, 1, 0]}


def test_a_prompt_that_adapts_has_nothing_of_its_own_for_a_later_task(tiny: dict) -> None:
    model = build_model(parse(tiny | {"method": "afcl", "prompt": "dualprompt"}), [4, 3])
    assert {name for name, _ in model.prompt.named_parameters()} == {"general", "experts.0", "keys.0"}


@pytest.mark.parametrize(("blocks", "unprompted"), [("2-5", Early(1, patches=True)), ("3-5", None)])
def test_a_frozen_feature_that_no_prompt_reaches_comes_from_the_pass_with_the_prompt(
    blocks: str, unprompted: Early | None, tiny: dict
) -> None:
    """It is of the second block, which the prompt changes or comes after."""
    model = build_model(parse(tiny | {"method": "fedrda", "fedrda-frozen-depth": 0.33, "prompt-blocks": blocks}), [4])
    assert model.unprompted == unprompted
    assert (Early(1, patches=True) in model.early) == (unprompted is None)


@pytest.mark.parametrize("prompt", ["lora", "l2p"])
def test_a_feature_without_the_prompt_stands_behind_the_adapted_ones(prompt: str, tiny: dict) -> None:
    """After a third of the 6 blocks; with frozen-depth = 1 q(x); without prompt it is one of the early features."""
    keys = tiny | {"method": "fedrda", "prompt": prompt}
    models = [build_model(parse(keys | {"fedrda-frozen-depth": depth}), [4]) for depth in (0, 0.33, 1)]
    keys["prompt"] = "none"
    frozen = [build_model(parse(keys | {"fedrda-frozen-depth": depth}), [4]) for depth in (0, 0.33, 1)]
    for model in models:
        for name, value in model.prompt.named_parameters():
            value.data += 0.1 * torch.randn(value.shape, generator=torch_rng(0, name))
    images = torch.randn(3, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        adapted, early, whole = (model.features(images) for model in models)
        bare = frozen[1].features(images)  # the last class token, then the mean patch tokens of blocks 2 and 1
        assert not torch.allclose(adapted, bare[:, :224], atol=1e-2)
        assert torch.equal(early, torch.cat([adapted, bare[:, 224:]], dim=1))
        assert torch.equal(whole, torch.cat([adapted, bare[:, :112]], dim=1))
        assert torch.equal(models[2].features(images, bare[:, :112])[:, 224:], bare[:, :112])  # a known query is taken
    assert models[1].unprompted == frozen[1].early[1] == Early(1, patches=True)
    assert [model.width for model in (*models, *frozen)] == [224, 336, 336, 224, 336, 224]
    reads = prompt == "l2p"
    assert [len(model.query_parts) for model in models] == [reads, 1 + reads, 1]
    assert [len(model.query_parts) for model in frozen] == [2, 3, 2]
    assert [model.reuses_query for model in models] == [reads, True, True]
    with torch.no_grad():
        for model in models[1:]:
            assert torch.equal(model.features(images, model.query(images)), model.features(images))


@pytest.mark.parametrize("depth", [0.33, 1])
def test_the_feature_without_the_prompt_is_of_the_runs_precision_and_can_be_differentiated(
    depth: float, tiny: dict
) -> None:
    """An attack that reconstructs images needs its gradient."""
    keys = tiny | {"method": "fedrda", "precision": "bf16", "fedrda-frozen-depth": depth}
    model, bare = (build_model(parse(keys | {"prompt": prompt}), [4]) for prompt in ("lora", "none"))
    images = torch.rand(3, 3, 16, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
    with torch.no_grad():
        plain = bare.features(images)
        assert torch.equal(model.features(images)[:, 224:], plain[:, 224:] if depth < 1 else plain[:, :112])
    model.features(images)[:, 224:].square().sum(dim=0)[0].backward()
    assert images.grad is not None
    assert images.grad.abs().max() > 0


def test_a_trained_heads_message_is_the_whole_model(tiny: dict) -> None:
    model = build_model(parse(tiny | {"method": "fedavg"}), [4])
    assert set(model.message_state()) == set(model.shared_state()) == {"prompt.prefix", "head.weight", "head.bias"}
