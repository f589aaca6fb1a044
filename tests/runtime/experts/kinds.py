"""Mixtures of a verifier on the fake GPU, for tests of every kind."""

from wingbeat.runtime.experts.forward import fuse_mixtures
from wingbeat.runtime.verifier.layers.loaded_model import LoadedModel


def fused(loaded: LoadedModel) -> None:
    fuse_mixtures(loaded.model)


PREPARED_FOR_GPU = {"experts": fused}
