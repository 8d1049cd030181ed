"""How often a backbone is passed."""

import pytest

from task.models.vit import ViT


@pytest.fixture
def passes(monkeypatch):
    """Images of each pass through a backbone: without prompt under False, be it a part of one, with one under True."""
    seen = {False: [], True: []}
    original, original_early = ViT.forward, ViT.early_feature

    def counted(self, images, prompted=None, projects=False, early=()):
        seen[bool(prompted)].append(len(images))
        return original(self, images, prompted, projects, early)

    def counted_early(self, images, early):
        seen[False].append(len(images))
        return original_early(self, images, early)

    monkeypatch.setattr(ViT, "forward", counted)
    monkeypatch.setattr(ViT, "early_feature", counted_early)
    return seen
