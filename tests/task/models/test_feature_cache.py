"""Queries are computed once per image, always in the same batches, and change no result."""

import gc
import json

import numpy as np
import pytest
import safetensors.numpy
import torch
from timm.models import VisionTransformer

from client_app.client import Node, handle
from server_app.rounds.run import run_experiment
from server_app.transport.in_process import InProcessTransport
from task.config.parsing import parse
from task.models import feature_cache as queries
from task.models.evaluation import confusion_counts, extract_features
from task.models.feature_cache import BatchCache, cached_query
from task.models.head import Head
from task.models.model import Model, build_model
from task.models.vit import Early, ViT
from task.prompt_kinds import PROMPTS
from task.prompts.base import Prompt
from task.scenario.scenario import build_scenario
from tests.helpers.marks import rest_in_ci
from tests.helpers.prompts import prompt_config
from tests.helpers.runs import run, train_message, without_times

UNASKED = ("shared", "lora")  # the prompts that neither read q(x) nor leave it as it is


@pytest.fixture(autouse=True)
def cache(monkeypatch):
    """Every test begins with nothing known."""
    fresh = BatchCache(2**20)
    monkeypatch.setattr(queries, "CACHE", fresh)
    return fresh


def built(tiny, prompt, **more):
    config = parse(tiny | {"method": "fedavg", "prompt": prompt} | more)
    scenario = build_scenario(config)
    model, rng = build_model(config, [6, 6]), torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=rng)
    return config, scenario, model


@pytest.mark.parametrize("prompt", PROMPTS)
def test_a_known_query_gives_the_features_that_the_images_give(tiny, prompt):
    _, scenario, model = built(tiny, prompt)
    images = scenario.dataset.train_images
    positions = np.arange(9)
    query = cached_query(model, images, positions)
    assert (query is None) == (prompt in UNASKED)
    prepared = queries.prepare(images[positions], model.backbone)
    with torch.no_grad():
        features, plain = model.features(prepared, query), model.features(prepared)
        assert torch.allclose(features, plain, atol=1e-6)
        if query is not None:
            assert torch.allclose(query, model.backbone(prepared), atol=1e-6)
            assert not torch.allclose(model.features(prepared, -query), plain, atol=1e-2)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_images_are_passed_as_often_as_needed(tiny, prompt, passes):
    """f(x) twice where a prompt changes it, q(x) once where it is read at all."""
    _, scenario, model = built(tiny, prompt)
    for _ in range(2):
        extract_features(model, scenario.dataset.train_images, np.arange(30))
    assert sum(passes[True]) == (0 if prompt == "none" else 60)
    assert sum(passes[False]) == (0 if prompt in UNASKED else 30)


def test_an_evaluation_passes_old_images_no_second_time(tiny, passes):
    """Task by task, with batches of 4: what fills the last batch of task 1 is asked for again, at most 3 images."""
    queries_per_task = []
    config, scenario, _ = built(tiny, "none")
    model = build_model(config, [6])
    order, labels = np.array([c for task in scenario.schedule.tasks for c in task]), scenario.dataset.test_labels
    every = np.arange(len(labels))
    for seen in (6, 12):
        if seen == 12:
            model.begin_task(6)
        before = sum(passes[False])
        counts = confusion_counts(model, scenario.dataset, order[:seen], every)
        queries_per_task.append(sum(passes[False]) - before)
        assert counts.sum() == np.isin(labels, order[:seen]).sum()
        assert 0 < counts.trace() <= counts.sum()
    first = np.isin(labels, order[:6]).sum()
    assert queries_per_task[0] == first
    assert queries_per_task[1] <= len(labels) - first + first % queries.BATCH


@pytest.mark.parametrize("prompt", ["lora", "dualprompt"])
def test_a_model_that_has_adapted_passes_no_test_image_twice(tiny, passes, prompt):
    """Its head may change as it will; a prompt of other numbers has other features."""
    config = parse(tiny | {"method": "afcl", "prompt": prompt})
    scenario, model = build_scenario(config), build_model(config, [6, 6])
    torch.nn.init.normal_(model.head.weight)
    labels, order = scenario.dataset.test_labels, np.array([c for task in scenario.schedule.tasks for c in task])

    def evaluate():
        before = sum(passes[True])
        counts = confusion_counts(model, scenario.dataset, order, np.arange(len(labels)))
        return counts, sum(passes[True]) - before

    first, passed = evaluate()
    assert passed == len(labels)
    again, passed = evaluate()
    assert (again.tolist(), passed) == (first.tolist(), 0)
    model.head.weight.data.neg_()
    assert evaluate()[0].tolist() != first.tolist()
    next(model.prompt.parameters()).data.normal_()
    assert evaluate()[1] == len(labels)


def test_models_of_one_prompt_that_differ_in_the_feature_without_it_share_no_batch(tiny):
    """Two runs in a process whose LoRA is the same, as it does not depend on this feature."""
    _, scenario, _ = built(tiny, "lora", method="fedrda")
    images, batch, features = scenario.dataset.test_images, np.arange(8), []
    for depth in (0.33, 0.5, 1):
        model = built(tiny, "lora", method="fedrda", **{"fedrda-frozen-depth": depth})[2]
        features.append(queries.adapted_features(model, images, batch))
        assert torch.equal(features[-1], model.features(*queries.cached_inputs(model, images, batch)))
    assert not any(torch.allclose(one, features[0], atol=1e-3) for one in features[1:])


@pytest.mark.parametrize(
    ("prompt", "one", "other"),
    [
        ("shared", {"prompt-blocks": "1-3"}, {"prompt-blocks": "4-6"}),
        ("shared", {}, {"prompt-projected": True}),
        ("lora", {"afcl-depth": 0.5}, {"afcl-depth": 0.67}),
        ("l2p", {"afcl-frozen-depth": 0.0}, {"afcl-frozen-depth": 1.0}),
        ("decomposed", {"prompt-pool": 10, "prompt-length": 1}, {"prompt-pool": 6, "prompt-length": 2}),
    ],
    ids=str,
)
def test_prompts_of_equal_arrays_that_are_used_otherwise_share_no_batch(tiny, prompt, one, other):
    """Two runs in a process whose prompt has learned nothing."""
    batch, models = np.arange(8), []
    for keys in (one, other):
        _, scenario, _ = built(tiny, prompt, method="afcl")
        models.append(build_model(parse(tiny | {"method": "afcl", "prompt": prompt} | keys), [6]))
    images = scenario.dataset.test_images
    features = [queries.adapted_features(model, images, batch) for model in models]
    assert torch.equal(features[1], models[1].features(*queries.cached_inputs(models[1], images, batch)))
    assert features[0].shape != features[1].shape or not torch.allclose(*features, atol=1e-3)


def test_a_prompt_that_reads_the_query_costs_one_pass_without_it_and_no_more(tiny, passes):
    """Of images that are known to no cache, as in prediction: the early feature comes from the same pass."""
    for depth in (0.33, 1):
        _, scenario, model = built(tiny, "l2p", method="fedrda", **{"fedrda-frozen-depth": depth})
        images = queries.prepare(scenario.dataset.test_images[np.arange(4)], model.backbone)
        before = {prompted: len(sizes) for prompted, sizes in passes.items()}
        features = model.features(images)
        assert {prompted: len(sizes) - before[prompted] for prompted, sizes in passes.items()} == {False: 1, True: 1}
        assert torch.allclose(features, model.features(images, model.query(images)), atol=1e-5)
        read = []  # whether a gradient would reach the images through what the prompt reads
        hook = model.prompt.register_forward_pre_hook(lambda _, args, read=read: read.append(args[0].requires_grad))
        assert model.features(images.requires_grad_()).requires_grad
        hook.remove()
        assert read == [False]
        assert not model.query(images).requires_grad


def test_models_that_read_different_features_share_no_query(tiny):
    """One reads two features of the frozen backbone, the other, beside its prompt, the last one alone."""
    _, scenario, bare = built(tiny, "none", method="fedrda", **{"fedrda-frozen-depth": 0})
    prompted = built(tiny, "l2p", method="fedrda", **{"fedrda-frozen-depth": 0})[2]
    images, batch = scenario.dataset.test_images, np.arange(8)
    widths = [cached_query(model, images, batch).shape[1] for model in (bare, prompted)]
    assert widths == [2 * bare.backbone.dim, bare.backbone.dim]


@pytest.mark.parametrize("augmentation", ["none", "crop"])
def test_features_without_prompt_cost_local_steps_nothing(tiny, passes, augmentation):
    """FedRDA with LoRA trains two epochs, then sends statistics twice. Only these need a feature without it, once."""
    keys = {"method": "fedrda", "augmentation": augmentation, "local-epochs": 2, "fedrda-adaptation-rounds": 1}
    config = parse(tiny | keys)
    answer = handle("train", train_message(config), Node({"partition-id": 0}))
    number = answer.metrics["num-examples"]
    assert (sum(passes[False]), sum(passes[True])) == (0, 2 * number)  # a round of adaptation sends no statistics
    _, scenario, model = built(tiny, "lora", method="fedrda")
    blocks = []
    hooks = [b.register_forward_hook(lambda *_, i=i: blocks.append(i)) for i, b in enumerate(model.backbone.vit.blocks)]
    for _ in range(2):
        features = extract_features(model, scenario.dataset.train_images, np.arange(30))
    for hook in hooks:
        hook.remove()
    assert features.shape == (30, 3 * model.backbone.dim)
    assert blocks == [0, 1, *range(6), *range(6)]  # a third of a pass without the prompt, then two whole ones with it
    assert (sum(passes[False]), sum(passes[True])) == (30, 2 * number + 60)


def test_training_without_augmentation_reuses_the_queries(tiny, passes):
    """Two epochs, then statistics: q(x) once per image, f(x) three times."""
    config = parse(tiny | {"method": "fppl", "augmentation": "none", "local-epochs": 2})
    answer = handle("train", train_message(config), Node({"partition-id": 0}))
    number = answer.metrics["num-examples"]
    assert (sum(passes[False]), sum(passes[True])) == (number, 3 * number)
    handle("train", train_message(config), Node({"partition-id": 0}))
    assert sum(passes[False]) == number


def test_training_with_augmentation_computes_a_query_in_every_step(tiny, passes):
    config = parse(tiny | {"method": "fppl", "augmentation": "crop", "local-epochs": 2})
    answer = handle("train", train_message(config), Node({"partition-id": 0}))
    number = answer.metrics["num-examples"]
    assert (sum(passes[False]), sum(passes[True])) == (3 * number, 3 * number)


@pytest.mark.parametrize("prompt", rest_in_ci(["none", "fused"], ["none"]))
def test_what_is_known_changes_no_bit(tiny, tmp_path, monkeypatch, prompt):
    """A cache that keeps all, one that keeps little and one that keeps nothing."""
    results, models = [], []
    for limit in (2**30, 20_000, 0):
        monkeypatch.setattr(queries, "CACHE", BatchCache(limit))
        values = {"method": "fedavg", "prompt": prompt, "augmentation": "none", "run-name": str(limit)}
        results.append(without_times(run(tiny | values | {"rounds-per-task": 2})))
        models.append(safetensors.numpy.load_file(tmp_path / "runs" / str(limit) / "model.safetensors"))
    assert results[0] == results[1] == results[2]
    assert all((models[0][n] == m[n]).all() for m in models[1:] for n in models[0])


def test_no_more_than_the_limit_is_kept_and_the_last_used_stay(tiny, monkeypatch, passes):
    """Room for three batches of 5 images: of five, the last three are kept, and a used one outlives newer ones."""
    monkeypatch.setattr(queries, "BATCH", 5)
    _, scenario, model = built(tiny, "none")
    images, width = scenario.dataset.train_images, 4 * 5 * model.backbone.dim
    cache = BatchCache(3 * width + width // 2)
    monkeypatch.setattr(queries, "CACHE", cache)

    def computed(start, stop):
        before = sum(passes[False])
        cached_query(model, images, np.arange(start, stop))
        return sum(passes[False]) - before

    assert computed(0, 25) == 25
    assert cache.size == 3 * width
    assert computed(10, 25) == 0
    assert computed(0, 5) == 5  # in place of 10 to 15
    assert computed(15, 20) == 0
    assert computed(30, 35) == 5  # in place of 20 to 25, the one unused for longest
    assert (computed(15, 20), computed(0, 5), computed(20, 25)) == (0, 0, 5)
    assert cache.size == 3 * width


def test_queries_belong_to_their_images_backbone_and_precision(tiny):
    """Equal positions elsewhere are other images; a dead source whose id comes back is not taken for it."""
    _, scenario, model = built(tiny, "none")
    train, test, positions = scenario.dataset.train_images, scenario.dataset.test_images, np.arange(6)
    first = cached_query(model, train, positions)
    assert not torch.equal(cached_query(model, test, positions), first)
    assert not torch.equal(cached_query(built(tiny, "none", precision="bf16")[2], train, positions), first)
    other = {"backbone-weights": "random"}
    assert not torch.allclose(cached_query(built(tiny, "none", **other)[2], train, positions), first, atol=1e-3)
    for shift in range(4):
        copy = np.roll(train[positions], shift, axis=0)
        assert torch.allclose(cached_query(model, copy, positions), first.roll(shift, 0), atol=1e-5)
        del copy
        gc.collect()
    assert torch.equal(cached_query(model, train, positions), first)


def test_a_backbone_that_trains_has_no_known_query():
    vit = VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=1, num_heads=3, num_classes=0)
    model = Model(ViT(vit, (0.5,) * 3, (0.25,) * 3), Prompt(prompt_config(), 0), Head(12, 0), "fp32")
    images = np.zeros((4, 8, 8, 3), np.uint8)
    assert cached_query(model, images, np.arange(4)) is not None
    model = Model(model.backbone, Prompt(prompt_config(), 0), Head(12, 0), "fp32", trains_backbone=True)
    assert cached_query(model, images, np.arange(4)) is None
    assert model.features(queries.prepare(images, model.backbone)).requires_grad


@pytest.mark.ci
def test_a_hundred_clients_keep_no_more_queries_than_ten(tiny, cache):
    """All training and test images once, in however many parts."""
    sizes = []
    for clients in (10, 100):
        cache.__init__(2**30)
        config = parse(tiny | {"method": "ncm", "num-clients": clients, "run-name": str(clients)})
        directory = run_experiment(config, InProcessTransport(clients))
        assert json.loads((directory / "results.json").read_text())["status"] == "finished"
        sizes.append(cache.size)
    dim = build_model(config, []).backbone.dim
    scenario = build_scenario(config)
    images = len(scenario.dataset.train_labels) + len(scenario.dataset.test_labels)
    assert all(4 * dim * images <= size <= 4 * dim * (images + queries.BATCH) for size in sizes)


def test_queries_belong_to_the_blocks_whose_tokens_they_hold() -> None:
    """Of two models with one backbone in a process, each with the token of another block beside the last."""
    torch.manual_seed(0)
    vit = VisionTransformer(img_size=8, patch_size=4, embed_dim=12, depth=3, num_heads=3, num_classes=0)
    backbone, prompt = ViT(vit, (0.5,) * 3, (0.25,) * 3), Prompt(prompt_config(), 0)
    images = np.random.default_rng(0).integers(0, 255, (4, 8, 8, 3), np.uint8)
    first, second = (
        cached_query(Model(backbone, prompt, Head(12, 0), "fp32", early=[Early(block)]), images, np.arange(4))
        for block in (0, 1)
    )
    assert first is not None
    assert second is not None
    assert first.shape == second.shape == (4, 24)
    same = [torch.equal(first[:, part], second[:, part]) for part in (slice(12), slice(12, 24))]
    assert sorted(same) == [False, True]
    patches = cached_query(
        Model(backbone, prompt, Head(12, 0), "fp32", early=[Early(1, patches=True)]), images, np.arange(4)
    )
    assert patches is not None
    assert not torch.allclose(patches[:, 12:], second[:, 12:], atol=1e-3)
